package turboattention

// #include <turboattention.h>
import "C"

import (
	"math"
	"unsafe"
)

// Half is the bits of an IEEE half, BFloat the upper bits of a float32.
type (
	Half   uint16
	BFloat uint16
)

// Element is what tensors consist of.
type Element interface{ float32 | Half | BFloat }

// Tensor is a view of [tokens, heads, dim] elements that the caller owns. A call reads an input and writes an output.
type Tensor struct {
	data                unsafe.Pointer
	dtype               DType
	tokens, heads, dim  int
	strideToken, stride int
	foreign             bool  // not memory of Go
	wrong               error // of a view that was made wrong: the call that gets it returns it
}

// TensorOf is a dense view of a slice of tokens * heads * dim elements.
func TensorOf[T Element](data []T, tokens, heads, dim int) Tensor {
	return StridedTensorOf(data, tokens, heads, dim, heads*dim, dim)
}

// StridedTensorOf is a view with strides, in elements, between tokens and between heads. Channels lie side by side.
func StridedTensorOf[T Element](data []T, tokens, heads, dim, strideToken, strideHead int) Tensor {
	t := Tensor{dtype: dtypeOf[T](), tokens: tokens, heads: heads, dim: dim, strideToken: strideToken, stride: strideHead}
	if len(data) > 0 {
		t.data = unsafe.Pointer(&data[0])
	}
	if tokens < 0 || heads < 1 || dim < 1 || strideToken < 0 || strideHead < 0 {
		t.wrong = errNegative
		return t
	}
	// The last element that is reached; a product of large numbers must not look small.
	last := float64(tokens-1)*float64(strideToken) + float64(heads-1)*float64(strideHead) + float64(dim)
	if tokens > 0 && last > float64(len(data)) {
		t.wrong = errShort
	}
	return t
}

// TensorAt is a view of memory that is not Go's: of a GPU, or of C. The caller keeps it valid until the work on it is done, on
// a GPU beyond the call.
func TensorAt(data unsafe.Pointer, dtype DType, tokens, heads, dim, strideToken, strideHead int) Tensor {
	return Tensor{data: data, dtype: dtype, tokens: tokens, heads: heads, dim: dim, strideToken: strideToken, stride: strideHead,
		foreign: true}
}

// Made once: a view that is made wrong costs no allocation either.
var (
	errNegative = refuse(ErrShape, "a tensor's tokens or strides are negative, or it has no heads or channels")
	errShort    = refuse(ErrShape, "a tensor's slice is shorter than its shape and strides say")
	errFloats   = refuse(ErrShape, "a slice of floats is shorter than the call's tensors say")
	errHost     = refuse(ErrInvalid, "memory of Go for a GPU, which uses it after the call: give it device memory with TensorAt")
)

func dtypeOf[T Element]() DType {
	switch any(*new(T)).(type) {
	case Half:
		return F16
	case BFloat:
		return BF16
	}
	return F32
}

// check says whether a call of a context on a device may take the view.
func (t *Tensor) check(device Device) error {
	if t.wrong != nil {
		return t.wrong
	}
	if device != CPU && !t.foreign && t.tokens > 0 {
		return errHost
	}
	return nil
}

// shape fills in all but the data.
func (t *Tensor) shape(c *C.ta_tensor) {
	c.struct_size = C.uint32_t(unsafe.Sizeof(*c))
	c.dtype = C.ta_dtype(t.dtype)
	c.tokens, c.heads, c.head_dim = C.int64_t(t.tokens), C.int64_t(t.heads), C.int64_t(t.dim)
	c.stride_token, c.stride_head = meant(t.strideToken), meant(t.stride)
}

// A stride of 0 is taken for what it is, never for a default.
func meant(stride int) C.int64_t {
	if stride == 0 {
		return C.TA_STRIDE_BROADCAST
	}
	return C.int64_t(stride)
}

// chars is the data as cgo takes it without a look at what else the allocation holds.
func (t *Tensor) chars() *C.char { return (*C.char)(t.data) }

// Floats is a list of float32 that a call reads or writes: an LSE, slopes, sinks. The zero Floats is none.
type Floats struct {
	data    unsafe.Pointer
	n       int
	foreign bool
}

// FloatsOf is a slice.
func FloatsOf(data []float32) Floats {
	if len(data) == 0 {
		return Floats{}
	}
	return Floats{unsafe.Pointer(&data[0]), len(data), false}
}

// FloatsAt is memory that is not Go's, as in [TensorAt].
func FloatsAt(data unsafe.Pointer, n int) Floats { return Floats{data, n, true} }

// check: none, or at least n of them.
func (f Floats) check(device Device, n int) error {
	switch {
	case f.data == nil:
		return nil
	case f.n < n:
		return errFloats
	case device != CPU && !f.foreign:
		return errHost
	}
	return nil
}

func (f Floats) c() *C.float { return (*C.float)(f.data) }

// A length for C, which takes 32 bits. A length that does not fit becomes the largest number, which the library refuses.
func uint32Of(n int) C.uint32_t {
	if n < 0 || n > math.MaxUint32 {
		return math.MaxUint32
	}
	return C.uint32_t(n)
}

func int32Of(n int) C.int32_t {
	if n < math.MinInt32 || n > math.MaxInt32 {
		return -1
	}
	return C.int32_t(n)
}
