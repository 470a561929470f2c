//! GPU memory by the driver's own calls, which needs no crate. Programs that use cudarc, candle or the like have pointers already.
use std::ffi::{c_void, CStr};
use std::os::raw::{c_char, c_int};
use turboattention::{DType, Stream, Tensor, TensorMut};

#[link(name = "dl")]
extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls a function of libcuda.so.1 by its name; an error of CUDA is `Err`.
macro_rules! cuda {
    ($name:literal, $($argument:expr => $type:ty),*) => {{
        let function = function(concat!($name, "\0"))?;
        // SAFETY: the types are those of cuda.h.
        let code = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn($($type),*) -> c_int>(function)($($argument),*) };
        if code == 0 { Ok(()) } else { Err(format!("{} failed with CUDA's error {}", $name, code)) }
    }};
}

fn function(name: &str) -> Result<*mut c_void, String> {
    const RTLD_NOW: c_int = 2;
    let name = CStr::from_bytes_with_nul(name.as_bytes()).unwrap();
    // SAFETY: strings of C; a library that is loaded again is the same one.
    let function = unsafe {
        let library = dlopen(b"libcuda.so.1\0".as_ptr().cast(), RTLD_NOW);
        if library.is_null() {
            return Err("no NVIDIA driver here".into());
        }
        dlsym(library, name.as_ptr())
    };
    if function.is_null() {
        Err(format!("the driver has no {:?}", name))
    } else {
        Ok(function)
    }
}

/// Makes GPU 0's primary context, which the library uses too, the calling thread's.
pub fn open() -> Result<(), String> {
    let (mut device, mut context) = (0 as c_int, std::ptr::null_mut::<c_void>());
    cuda!("cuInit", 0 => u32)?;
    cuda!("cuDeviceGet", &mut device => &mut c_int, 0 => c_int)?;
    cuda!("cuDevicePrimaryCtxRetain", &mut context => &mut *mut c_void, device => c_int)?;
    cuda!("cuCtxSetCurrent", context => *mut c_void)
}

/// A stream that does not wait for others. It lives as long as the process.
pub fn stream() -> Result<Stream, String> {
    const NON_BLOCKING: u32 = 1;
    let mut stream = std::ptr::null_mut::<c_void>();
    cuda!("cuStreamCreate", &mut stream => &mut *mut c_void, NON_BLOCKING => u32)?;
    // SAFETY: a CUstream is a cudaStream_t; it is never destroyed.
    Ok(unsafe { Stream::from_raw(stream) })
}

/// Waits until the GPU has done all that it was told.
pub fn synchronize() -> Result<(), String> {
    cuda!("cuCtxSynchronize",)
}

/// Floats in GPU memory.
pub struct Buffer {
    address: u64,
    len: usize,
}

impl Buffer {
    pub fn new(data: &[f32]) -> Result<Self, String> {
        let mut buffer = Buffer { address: 0, len: data.len() };
        let bytes = std::mem::size_of_val(data);
        cuda!("cuMemAlloc_v2", &mut buffer.address => &mut u64, bytes => usize)?;
        cuda!("cuMemcpyHtoD_v2", buffer.address => u64, data.as_ptr() => *const f32, bytes => usize)?;
        Ok(buffer)
    }

    /// Waits for the GPU, and copies what it wrote.
    pub fn read(&self) -> Result<Vec<f32>, String> {
        synchronize()?;
        let mut data = vec![0f32; self.len];
        cuda!("cuMemcpyDtoH_v2", data.as_mut_ptr() => *mut f32, self.address => u64, self.len * 4 => usize)?;
        Ok(data)
    }

    #[allow(dead_code)] // tests use it
    pub fn address(&self) -> u64 {
        self.address
    }

    fn checked(&self, [tokens, heads, channels]: [usize; 3]) -> ([i64; 3], [i64; 2]) {
        assert!(tokens * heads * channels <= self.len);
        ([tokens as i64, heads as i64, channels as i64], [(heads * channels) as i64, channels as i64])
    }

    pub fn tensor(&self, shape: [usize; 3]) -> Tensor<'_> {
        let (shape, strides) = self.checked(shape);
        // SAFETY: inside the buffer, which the caller keeps until the GPU has done its work.
        unsafe { Tensor::from_raw(self.address as *const c_void, DType::F32, shape, strides) }
    }

    pub fn tensor_mut(&mut self, shape: [usize; 3]) -> TensorMut<'_> {
        let (shape, strides) = self.checked(shape);
        // SAFETY: as above.
        unsafe { TensorMut::from_raw(self.address as *mut c_void, DType::F32, shape, strides) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // cuMemFree waits for work that uses the memory. An error has come before, from other calls.
        let free = || cuda!("cuMemFree_v2", self.address => u64);
        let _ = free();
    }
}
