//! The calls, structs and constants of `turboattention.h`, as bindgen writes them. The header says what each of them does; the
//! crate `turboattention` is the safe layer above.
//!
//! With the feature `stub` nothing is linked: the first call loads `libturboattention.so.1` from where the system finds shared
//! libraries (`LD_LIBRARY_PATH`), and [`load`] says what is wrong when it is not there.
#![allow(non_camel_case_types, clippy::missing_safety_doc, clippy::too_many_arguments)]

macro_rules! plain_structs {
    ($($name:ident,)*) => {$(
        impl Default for $name {
            /// All bytes zero.
            fn default() -> Self {
                // SAFETY: the struct has integers, floats, arrays of them, raw pointers and optional functions; zero is valid.
                unsafe { std::mem::zeroed() }
            }
        }
    )*};
}

macro_rules! sized_structs {
    ($($name:ident,)*) => {
        plain_structs! { $($name,)* }
        $(impl $name {
            /// `struct_size` set, the rest zero, which is the default of each field.
            pub fn new() -> Self {
                Self { struct_size: std::mem::size_of::<Self>() as u32, ..Default::default() }
            }
        })*
    };
}

#[cfg(not(feature = "stub"))]
macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)?;)*) => {
        extern "C" { $(pub fn $name($($argument: $type),*) $(-> $output)?;)* }

        /// Nothing to do: the library is linked.
        pub fn load() -> Result<(), &'static str> {
            Ok(())
        }
    };
}

#[cfg(feature = "stub")]
#[macro_use]
mod stub;
#[cfg(feature = "stub")]
pub use stub::load;

include!("bindings.rs");

/// `TA_STRIDE_BROADCAST`: a stride of 0 that is meant.
pub const TA_STRIDE_BROADCAST: i64 = i64::MIN;

/// `ta_tensor_make_strided`: a view with these strides. A stride of 0 is taken for what it is, never for a default.
pub fn ta_tensor_make_strided(
    data: *const std::os::raw::c_void,
    dtype: ta_dtype,
    shape: [i64; 3],
    stride_token: i64,
    stride_head: i64,
) -> ta_tensor {
    let meant = |stride| if stride != 0 { stride } else { TA_STRIDE_BROADCAST };
    ta_tensor {
        struct_size: std::mem::size_of::<ta_tensor>() as u32,
        dtype,
        data: data as *mut _,
        tokens: shape[0],
        heads: shape[1],
        head_dim: shape[2],
        stride_token: meant(stride_token),
        stride_head: meant(stride_head),
    }
}

/// `ta_tensor_make`: [tokens, heads, head_dim] without gaps.
pub fn ta_tensor_make(data: *const std::os::raw::c_void, dtype: ta_dtype, shape: [i64; 3]) -> ta_tensor {
    let [_, heads, head_dim] = shape;
    let mut tensor = ta_tensor_make_strided(data, dtype, shape, 1, 1);
    // Of a shape that overflows both strides are left to the library, which refuses it.
    match heads.checked_mul(head_dim) {
        Some(stride) if heads > 0 && head_dim > 0 => {
            tensor.stride_token = stride;
            tensor.stride_head = head_dim;
        }
        _ => {
            tensor.stride_token = 0;
            tensor.stride_head = 0;
        }
    }
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step through the calls themselves.
    #[test]
    fn one_step() {
        load().unwrap();
        assert_eq!(unsafe { ta_abi_version() }, TA_ABI_VERSION);
        let (k, q) = (vec![0.5f32; 2 * 64], vec![0.25f32; 2 * 2 * 64]);
        let mut out = vec![0f32; q.len()];
        unsafe {
            let mut err = ta_error::default();
            let (mut context, mut pool) = (std::ptr::null_mut(), std::ptr::null_mut());
            let (mut plan, mut seq) = (std::ptr::null_mut(), 0);
            let options =
                ta_kv_pool_options { layers: 1, kv_heads: 1, head_dim: 64, budget_bytes: 1 << 20, ..ta_kv_pool_options::new() };
            assert_eq!(ta_context_create(std::ptr::null(), &mut context, &mut err), TA_OK);
            assert_eq!(ta_kv_pool_create(context, &options, &mut pool, &mut err), TA_OK);
            assert_eq!(ta_plan_create(pool, std::ptr::null(), &mut plan, &mut err), TA_OK);
            assert_eq!(ta_seq_create(pool, &mut seq, &mut err), TA_OK);
            let k = ta_tensor_make(k.as_ptr().cast(), TA_DTYPE_F32, [2, 1, 64]);
            let q = ta_tensor_make(q.as_ptr().cast(), TA_DTYPE_F32, [2, 2, 64]);
            let o = ta_tensor_make(out.as_mut_ptr().cast(), TA_DTYPE_F32, [2, 2, 64]);
            assert_eq!(ta_plan_begin(plan, 1, &seq, &2, std::ptr::null(), std::ptr::null(), &mut err), TA_OK);
            assert_eq!(ta_append(plan, 0, &k, &k, &mut err), TA_OK);
            assert_eq!(ta_attend(plan, 0, &q, &o, std::ptr::null_mut(), std::ptr::null(), &mut err), TA_OK);
            assert_eq!(ta_plan_end(plan, std::ptr::null(), &mut err), TA_OK);
            ta_context_destroy(context);
            ta_kv_pool_destroy(pool);
            ta_plan_destroy(plan);
        }
        assert!(out.iter().all(|x| (x - 0.5).abs() < 0.01), "{:?}", &out[..4]);
    }

    /// Is `src/bindings.rs` what the header asks for? Needs bindgen 0.60, so scripts/check-bindings runs it, not everybody.
    #[test]
    #[ignore]
    fn bindings_are_fresh() {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/generate");
        assert!(std::process::Command::new(script).arg("--check").status().unwrap().success());
    }
}
