use std::marker::PhantomData;
use std::os::raw::c_void;

use crate::{ffi, DType, DeviceKind, Error, ErrorKind, Result};

/// An element type of tensors.
///
/// # Safety
/// The type has the size, alignment and bits of the elements that `DTYPE` names, and any bits are valid.
pub unsafe trait Element: Copy {
    /// The type as the library names it.
    const DTYPE: DType;
}

/// The bits of an IEEE half. Types of other crates with these bits can implement [`Element`], too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// The upper half of an `f32`'s bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: as the trait asks.
unsafe impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
// SAFETY: as the trait asks.
unsafe impl Element for F16 {
    const DTYPE: DType = DType::F16;
}
// SAFETY: as the trait asks.
unsafe impl Element for Bf16 {
    const DTYPE: DType = DType::Bf16;
}

/// A view of [tokens, heads, channels] elements that a call reads.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    pub(crate) raw: ffi::ta_tensor,
    slice: bool,
    data: PhantomData<&'a [u8]>,
}

/// A view of [tokens, heads, channels] elements that a call writes.
pub struct TensorMut<'a> {
    pub(crate) raw: ffi::ta_tensor,
    slice: bool,
    data: PhantomData<&'a mut [u8]>,
}

// SAFETY: as the slices that they stand for.
unsafe impl Send for Tensor<'_> {}
unsafe impl Sync for Tensor<'_> {}
unsafe impl Send for TensorMut<'_> {}
unsafe impl Sync for TensorMut<'_> {}

fn shape_error(message: &'static str) -> Error {
    Error::new(ErrorKind::Shape, message)
}

/// A view of a slice of `len` elements, all of it inside.
fn checked(data: *const c_void, len: usize, dtype: DType, shape: [usize; 3], strides: [usize; 2]) -> Result<ffi::ta_tensor> {
    let [tokens, heads, channels] = shape;
    if heads == 0 || channels == 0 {
        return Err(shape_error("a tensor has at least one head and one channel"));
    }
    let reach = |n: usize, stride: usize| (n as u128 - 1).checked_mul(stride as u128);
    let inside = tokens == 0
        || reach(tokens, strides[0])
            .and_then(|n| n.checked_add(reach(heads, strides[1])?)?.checked_add(channels as u128))
            .map_or(false, |n| n <= len as u128);
    let integer = |n: usize| i64::try_from(n).map_err(|_| shape_error("a tensor's shape or stride is beyond 2^63"));
    let shape = [integer(tokens)?, integer(heads)?, integer(channels)?];
    let (stride_token, stride_head) = (integer(strides[0])?, integer(strides[1])?);
    if !inside {
        return Err(shape_error("a tensor's slice is shorter than its shape and strides say"));
    }
    Ok(ffi::ta_tensor_make_strided(data, dtype as i32, shape, stride_token, stride_head))
}

fn dense(shape: [usize; 3]) -> Result<[usize; 2]> {
    let token = shape[1].checked_mul(shape[2]).ok_or_else(|| shape_error("a tensor's shape is beyond 2^64"))?;
    Ok([token, shape[2]])
}

fn accepted(raw: &ffi::ta_tensor, slice: bool, device: DeviceKind) -> Result<*const ffi::ta_tensor> {
    if slice && device != DeviceKind::Cpu && raw.tokens > 0 {
        return Err(Error::new(
            ErrorKind::Invalid,
            "a slice for a GPU, which uses it after the call: give it device memory with from_raw",
        ));
    }
    Ok(raw)
}

impl<'a> Tensor<'a> {
    /// A dense view of the first tokens * heads * channels elements of a slice.
    ///
    /// # Errors
    /// `Shape`: no heads or channels, or the slice is shorter than the shape says.
    pub fn new<T: Element>(data: &'a [T], shape: [usize; 3]) -> Result<Self> {
        Self::strided(data, shape, dense(shape)?)
    }

    /// A view with strides, in elements, between tokens and between heads. Channels lie side by side.
    ///
    /// # Errors
    /// `Shape`: no heads or channels, or the slice is shorter than shape and strides say.
    pub fn strided<T: Element>(data: &'a [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        let raw = checked(data.as_ptr().cast(), data.len(), T::DTYPE, shape, strides)?;
        Ok(Tensor { raw, slice: true, data: PhantomData })
    }

    /// A view of memory that is not a slice, such as that of a GPU. Strides may be negative.
    ///
    /// # Safety
    /// All that the shape and strides reach can be read in the context's memory, and nobody writes it, until the work of the calls
    /// that get it is done: on a GPU that is when the stream has come there, however short `'a` is.
    pub unsafe fn from_raw(data: *const c_void, dtype: DType, shape: [i64; 3], strides: [i64; 2]) -> Self {
        let raw = ffi::ta_tensor_make_strided(data, dtype as i32, shape, strides[0], strides[1]);
        Tensor { raw, slice: false, data: PhantomData }
    }

    pub(crate) fn get(&self, device: DeviceKind) -> Result<*const ffi::ta_tensor> {
        accepted(&self.raw, self.slice, device)
    }

    /// How many floats an LSE of it has.
    pub(crate) fn rows(&self) -> u128 {
        self.raw.tokens.max(0) as u128 * self.raw.heads.max(0) as u128
    }
}

impl<'a> TensorMut<'a> {
    /// A dense view of the first tokens * heads * channels elements of a slice.
    ///
    /// # Errors
    /// `Shape`: no heads or channels, or the slice is shorter than the shape says.
    pub fn new<T: Element>(data: &'a mut [T], shape: [usize; 3]) -> Result<Self> {
        Self::strided(data, shape, dense(shape)?)
    }

    /// A view with strides, in elements, between tokens and between heads. Channels lie side by side; what lies between them is
    /// not written.
    ///
    /// # Errors
    /// `Shape`: no heads or channels, or the slice is shorter than shape and strides say.
    pub fn strided<T: Element>(data: &'a mut [T], shape: [usize; 3], strides: [usize; 2]) -> Result<Self> {
        let raw = checked(data.as_mut_ptr().cast(), data.len(), T::DTYPE, shape, strides)?;
        Ok(TensorMut { raw, slice: true, data: PhantomData })
    }

    /// A view of memory that is not a slice, such as that of a GPU. Strides may be negative.
    ///
    /// # Safety
    /// All that the shape and strides reach can be written in the context's memory, and nobody else uses it, until the work of the
    /// calls that get it is done: on a GPU that is when the stream has come there, however short `'a` is.
    pub unsafe fn from_raw(data: *mut c_void, dtype: DType, shape: [i64; 3], strides: [i64; 2]) -> Self {
        let raw = ffi::ta_tensor_make_strided(data, dtype as i32, shape, strides[0], strides[1]);
        TensorMut { raw, slice: false, data: PhantomData }
    }

    pub(crate) fn get(&self, device: DeviceKind) -> Result<*const ffi::ta_tensor> {
        accepted(&self.raw, self.slice, device)
    }

    pub(crate) fn rows(&self) -> u128 {
        self.raw.tokens.max(0) as u128 * self.raw.heads.max(0) as u128
    }
}

macro_rules! floats {
    ($(#[$meta:meta])* $name:ident, $slice:ty, $pointer:ty, $as_pointer:ident) => {
        $(#[$meta])*
        pub struct $name<'a> {
            data: $pointer,
            len: usize,
            slice: bool,
            marker: PhantomData<$slice>,
        }

        // SAFETY: as the slices that they stand for.
        unsafe impl Send for $name<'_> {}
        unsafe impl Sync for $name<'_> {}

        impl<'a> From<$slice> for $name<'a> {
            fn from(data: $slice) -> Self {
                $name { data: data.$as_pointer(), len: data.len(), slice: true, marker: PhantomData }
            }
        }

        impl<'a> $name<'a> {
            /// Memory that is not a slice, such as that of a GPU.
            ///
            /// # Safety
            /// As of `from_raw` of the tensors.
            pub unsafe fn from_raw(data: $pointer, len: usize) -> Self {
                $name { data, len, slice: false, marker: PhantomData }
            }

            /// The pointer for a call that uses `n` of them.
            pub(crate) fn get(&self, device: DeviceKind, n: u128) -> Result<$pointer> {
                if (self.len as u128) < n {
                    return Err(shape_error("a slice of floats is shorter than the call's tensors say"));
                }
                if self.slice && device != DeviceKind::Cpu && n > 0 {
                    return Err(Error::new(
                        ErrorKind::Invalid,
                        "a slice for a GPU, which uses it after the call: give it device memory with from_raw",
                    ));
                }
                Ok(self.data)
            }
        }
    };
}

floats! {
    /// Floats that a call reads: slopes, sinks, an LSE to be merged. Made of a slice with `into()`.
    #[derive(Clone, Copy)]
    Floats, &'a [f32], *const f32, as_ptr
}
floats! {
    /// Floats that a call writes: an LSE. Made of a slice with `into()`.
    FloatsMut, &'a mut [f32], *mut f32, as_mut_ptr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_stay_inside() {
        let data = [0f32; 24];
        assert!(Tensor::new(&data, [2, 3, 4]).is_ok());
        assert!(Tensor::new(&data, [0, 3, 400]).is_ok());
        for shape in [[3, 3, 4], [2, 3, 5], [1, 0, 4], [1, 1, 0], [usize::MAX, 3, 4], [2, usize::MAX, 2], [2, 1, usize::MAX]] {
            assert_eq!(Tensor::new(&data, shape).err().map(|e| e.kind), Some(ErrorKind::Shape), "{:?}", shape);
        }
        assert!(Tensor::strided(&data, [3, 2, 4], [4, 12]).is_ok()); // [heads, tokens, channels]
        for strides in [[4, 17], [11, 4], [usize::MAX, 4], [usize::MAX, usize::MAX]] {
            assert!(Tensor::strided(&data, [3, 2, 4], strides).is_err(), "{:?}", strides);
        }
    }

    #[test]
    fn gpus_get_no_slices() {
        let mut data = [0f32; 4];
        assert!(Tensor::new(&data, [1, 1, 4]).unwrap().get(DeviceKind::Cuda).is_err());
        assert!(Floats::from(&data[..]).get(DeviceKind::Cuda, 4).is_err());
        assert!(Floats::from(&data[..]).get(DeviceKind::Cpu, 5).is_err());
        assert!(TensorMut::new(&mut data, [1, 1, 4]).unwrap().get(DeviceKind::Cuda).is_err());
        assert!(FloatsMut::from(&mut data[..]).get(DeviceKind::Cpu, 4).is_ok());
    }
}
