use std::ptr::{self, NonNull};

use crate::error::call;
use crate::plan::lse_pointer;
use crate::pool::map_sizes;
use crate::{
    ffi, AttendOptions, Context, DenseVariant, DeviceKind, Error, ErrorKind, Floats, FloatsMut, Granularity, LayerGroup,
    NonFinite, PoolOptions, Result, Stream, Tensor, TensorMut,
};

/// Options of [`Context::attend_dense`]; make them with `..Default::default()`.
#[derive(Clone, Copy, Default)]
pub struct DenseOptions<'a> {
    /// How values are quantized.
    pub variant: DenseVariant,
    /// Sequences; 0: 1, or what the offsets say.
    pub batch: u32,
    /// [batch + 1] prefix sums of query tokens; `None`: split evenly.
    pub q_offsets: Option<&'a [i64]>,
    /// [batch + 1] prefix sums of keys; `None`: split evenly.
    pub k_offsets: Option<&'a [i64]>,
    /// What shares a scale of V.
    pub v_granularity: Granularity,
    /// What values do that are not finite.
    pub nonfinite: NonFinite,
    /// Mask, scale and so on.
    pub attend: AttendOptions<'a>,
    /// Of a GPU context.
    pub stream: Stream,
    /// Of [`DenseVariant::Distr`]: channels that share a score, 2, 3 or 4; 0: 2.
    pub group_size: u32,
}

/// Attention of some queries over a set of keys, with its LSE.
#[derive(Clone, Copy)]
pub struct State<'a> {
    /// [tokens, heads, channels].
    pub out: Tensor<'a>,
    /// [tokens, heads].
    pub lse: Floats<'a>,
}

impl Context {
    /// Attention over plain tensors, without a pool: q and out [query tokens, query heads, channels], k and v [keys, kv heads,
    /// channels]. Values are quantized to INT8 on the way, or channels are grouped ([`DenseVariant::Distr`]).
    ///
    /// # Errors
    /// `Invalid` (an option outside its range, offsets that are no prefix sums, outputs that overlap; on a GPU memory that it
    /// cannot reach), `Shape`, `DType`, `NonFinite` (on a GPU a later call), `State` (on a GPU: the stream is being captured),
    /// `Memory`, `Unsupported` (channels; a stream on a CPU; a driver without memory pools).
    pub fn attend_dense(
        &self,
        q: Tensor<'_>,
        k: Tensor<'_>,
        v: Tensor<'_>,
        out: TensorMut<'_>,
        lse: Option<FloatsMut<'_>>,
        options: &DenseOptions<'_>,
    ) -> Result<()> {
        let device = self.device();
        let mut batch = options.batch;
        for offsets in [options.q_offsets, options.k_offsets].into_iter().flatten() {
            if batch == 0 {
                batch = u32::try_from(offsets.len().saturating_sub(1)).unwrap_or(u32::MAX);
            }
            if offsets.len() < 2 || offsets.len() as u64 != u64::from(batch) + 1 {
                return Err(Error::new(ErrorKind::Invalid, "offsets need one number more than there are sequences"));
            }
        }
        let lse = lse_pointer(lse, device, q.rows())?;
        let attend = options.attend.raw(device, &q)?;
        let offsets = |list: Option<&[i64]>| list.map_or(ptr::null(), |list| list.as_ptr());
        let raw = ffi::ta_dense_options {
            variant: options.variant as i32,
            batch,
            q_offsets: offsets(options.q_offsets),
            k_offsets: offsets(options.k_offsets),
            v_granularity: options.v_granularity as i32,
            nonfinite: options.nonfinite as i32,
            attend: &attend,
            stream: options.stream.0,
            group_size: options.group_size,
            ..ffi::ta_dense_options::new()
        };
        let (q, k, v, out) = (q.get(device)?, k.get(device)?, v.get(device)?, out.get(device)?);
        // SAFETY: the handle is alive; views are valid as their makers promised; lists have the lengths that q and batch say.
        call(|err| unsafe { ffi::ta_attend_dense(self.raw(), q, k, v, out, lse, &raw, err) })
    }

    /// Merges attention of the same queries over 1 to 64 disjoint sets of keys, in the order of the list, into attention over
    /// all of them. `lse` gets [tokens, heads]; `stream` is the default on a CPU.
    ///
    /// # Errors
    /// `Invalid` (the number of states, outputs that overlap; on a GPU memory that it cannot reach), `Shape`, `DType`,
    /// `NonFinite` (on a CPU), `Unsupported` (channels; a stream on a CPU), on a GPU `State` (no stream while one is captured
    /// that synchronizes with the default stream).
    pub fn merge_states(
        &self,
        states: &[State<'_>],
        out: TensorMut<'_>,
        lse: Option<FloatsMut<'_>>,
        stream: Stream,
    ) -> Result<()> {
        let device = self.device();
        let (mut parts, mut lses) = (Vec::with_capacity(states.len()), Vec::with_capacity(states.len()));
        for state in states {
            state.out.get(device)?;
            parts.push(state.out.raw);
            lses.push(state.lse.get(device, state.out.rows())?);
        }
        let n = u32::try_from(states.len()).unwrap_or(u32::MAX);
        let lse = lse_pointer(lse, device, out.rows())?;
        let out = out.get(device)?;
        // SAFETY: the handle is alive; the lists have n elements; views are valid as their makers promised.
        call(|err| unsafe { ffi::ta_merge_states(self.raw(), n, parts.as_ptr(), lses.as_ptr(), out, lse, stream.0, err) })
    }
}

/// Finds the bits of kv heads: ranks those of each layer for 4 or 2 bits, or chooses by costs. One thread at a time.
pub struct Calibrator {
    raw: NonNull<ffi::ta_calibrator>,
    device: DeviceKind,
    heads: usize, // of all layers
}

// SAFETY: any thread may use a ta_calibrator, one at a time.
unsafe impl Send for Calibrator {}

impl Drop for Calibrator {
    fn drop(&mut self) {
        // SAFETY: the only destroy of the handle.
        unsafe { ffi::ta_calibrator_destroy(self.raw.as_ptr()) }
    }
}

/// Maps for [`PoolOptions`](crate::PoolOptions), and the priorities behind them, each [layers, kv heads of the layer].
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct BitMaps {
    pub k_bits: Vec<u8>,
    pub v_bits: Vec<u8>,
    pub k_priority: Vec<f32>,
    pub v_priority: Vec<f32>,
}

impl Calibrator {
    /// Creates a calibrator.
    ///
    /// # Errors
    /// `Invalid` (layers, heads), `Unsupported` (channels).
    pub fn new(context: &Context, layers: u32, kv_heads: u32, head_dim: u32) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_calibrator_create(context.raw(), layers, kv_heads, head_dim, &mut raw, err) })?;
        // SAFETY: not null on success.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        Ok(Calibrator { raw, device: context.device(), heads: layers as usize * kv_heads as usize })
    }

    /// Creates a calibrator for the shape of a pool with these options, whose layers may differ. Other options are ignored.
    ///
    /// # Errors
    /// `Invalid`, `Unsupported`.
    pub fn with_shape(context: &Context, options: &PoolOptions) -> Result<Self> {
        let groups: Vec<_> = options.layer_groups.iter().map(LayerGroup::raw).collect();
        let mut raw = ptr::null_mut();
        let shape = options.raw_shape(&groups);
        // SAFETY: the handle is alive, and so are the groups that the shape points to.
        call(|err| unsafe { ffi::ta_calibrator_create_for(context.raw(), &shape, &mut raw, err) })?;
        // SAFETY: not null on success.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        let (heads, _) = map_sizes(options.layers, options.kv_heads, options.head_dim, &options.layer_groups);
        let heads = usize::try_from(heads).expect("a shape that the library takes");
        Ok(Calibrator { raw, device: context.device(), heads })
    }

    /// Takes k and v of some tokens of a layer into account: [tokens, kv heads, channels].
    ///
    /// # Errors
    /// `Invalid` (no such layer), `Shape`, `DType`, `NonFinite`, `Memory`.
    pub fn observe(&mut self, layer: u32, k: Tensor<'_>, v: Tensor<'_>) -> Result<()> {
        let (k, v) = (k.get(self.device)?, v.get(self.device)?);
        // SAFETY: the handle is alive and exclusively borrowed; views are valid as their makers promised.
        call(|err| unsafe { ffi::ta_calibrator_observe(self.raw.as_ptr(), layer, k, v, err) })
    }

    /// Ranks: `low` heads of each layer get 2 bits, for K and for V each, the others 4.
    ///
    /// # Errors
    /// `Invalid` (more heads than there are), `State` (a layer was never observed).
    pub fn finish(&self, low: u32) -> Result<BitMaps> {
        let n = self.heads;
        let mut maps = BitMaps { k_bits: vec![0; n], v_bits: vec![0; n], k_priority: vec![0.0; n], v_priority: vec![0.0; n] };
        // SAFETY: the handle is alive, and not used by another thread, as it is not Sync; the lists have [layers, kv_heads]
        // elements.
        call(|err| unsafe {
            let (k, v) = (maps.k_bits.as_mut_ptr(), maps.v_bits.as_mut_ptr());
            let (kp, vp) = (maps.k_priority.as_mut_ptr(), maps.v_priority.as_mut_ptr());
            ffi::ta_calibrator_finish(self.raw.as_ptr(), low, k, v, kp, vp, err)
        })?;
        Ok(maps)
    }

    /// The maps of least total cost whose blocks have at most `block_bytes`; their priorities are empty. Costs are
    /// [layers, kv heads of the layer, 3]: with 8 bits, with 4, and with 2; infinite: never with these bits.
    ///
    /// # Errors
    /// `Invalid` (lists of another length, a cost that is NaN or -Inf, a head whose costs are all infinite, blocks smaller than
    /// the costs allow: the error's bytes say by how much).
    pub fn choose(&self, k_cost: &[f32], v_cost: &[f32], block_bytes: u64) -> Result<BitMaps> {
        let n = self.heads;
        if k_cost.len() != 3 * n || v_cost.len() != 3 * n {
            return Err(Error::new(ErrorKind::Invalid, "costs are [layers, kv heads, 3]"));
        }
        let mut maps = BitMaps { k_bits: vec![0; n], v_bits: vec![0; n], k_priority: vec![], v_priority: vec![] };
        // SAFETY: the handle is alive, and not used by another thread, as it is not Sync; the lists have as many elements as the
        // call takes.
        call(|err| unsafe {
            let (k, v) = (maps.k_bits.as_mut_ptr(), maps.v_bits.as_mut_ptr());
            ffi::ta_calibrator_choose(self.raw.as_ptr(), k_cost.as_ptr(), v_cost.as_ptr(), block_bytes, k, v, err)
        })?;
        Ok(maps)
    }
}
