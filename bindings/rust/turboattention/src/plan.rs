use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use crate::error::call;
use crate::{
    ffi, DeviceKind, Error, ErrorKind, Exp, Floats, FloatsMut, Mask, Pool, Result, Sequence, Switch, Tensor, TensorMut, P,
};

/// A CUDA stream. The default is the legacy default stream, and the only one that there is on a CPU.
#[derive(Clone, Copy, Debug)]
pub struct Stream(pub(crate) ffi::ta_stream);

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
unsafe impl Sync for Stream {}

impl Stream {
    /// A `cudaStream_t`.
    ///
    /// # Safety
    /// The stream must be valid as long as anything that got it, such as a plan, and until the work enqueued on it is done.
    pub unsafe fn from_raw(stream: *mut std::os::raw::c_void) -> Self {
        Stream(stream.cast())
    }
}

impl Default for Stream {
    fn default() -> Self {
        Stream(ptr::null_mut())
    }
}

/// Makes steps over batches of sequences of one pool. One thread at a time.
pub struct Plan {
    raw: NonNull<ffi::ta_plan>,
    pool: Pool,
    open: bool,
    // Of the step that begins; kept for their memory.
    ids: Vec<ffi::ta_seq>,
    new: Vec<i32>,
    queries: Vec<i32>,
    keep: Vec<i32>, // of its end
}

// SAFETY: any thread may use a ta_plan, one at a time.
unsafe impl Send for Plan {}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the only destroy of the handle; it aborts an open step.
        unsafe { ffi::ta_plan_destroy(self.raw.as_ptr()) }
    }
}

/// What a step does with one sequence.
pub struct Entry<'a> {
    seq: &'a mut Sequence,
    new: usize,
    queries: Option<usize>,
}

impl<'a> Entry<'a> {
    /// The step brings `new` tokens and attends with them.
    pub fn new(seq: &'a mut Sequence, new: usize) -> Self {
        Entry { seq, new, queries: None }
    }

    /// Attends with the last `queries` tokens instead, new and old.
    pub fn queries(mut self, queries: usize) -> Self {
        self.queries = Some(queries);
        self
    }
}

impl<'a> From<(&'a mut Sequence, usize)> for Entry<'a> {
    fn from((seq, new): (&'a mut Sequence, usize)) -> Self {
        Entry::new(seq, new)
    }
}

/// How a step differs from an ordinary one: options of [`Plan::begin_with`]; make them with `..Default::default()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepOptions<'a> {
    /// How long the begin may wait for room, in milliseconds; 0: [`TierOptions::begin_wait_ms`](crate::TierOptions::begin_wait_ms);
    /// -1: not at all.
    pub wait_ms: i32,
    /// On: [`Step::end_keeping`] may keep a part of the new tokens, as a verification of drafts does. Blocks that the step fills
    /// take room at 8 bits and at their own until then.
    pub drafts: Switch,
    /// On: you attend to a layer before you append the next one, and a prompt takes 1/layers of the memory beside the pool.
    pub layers_in_order: Switch,
    /// Token trees, [sum of new tokens]: the parent of each new token, an index among its sequence's new ones; -1: the
    /// sequence's last token. Implies `drafts`; as many queries as new tokens, up to 64 of a sequence.
    pub tree_parent: Option<&'a [i32]>,
    /// [sum of queries]: the position of each query token in its sequence, in any order; it sees the tokens up to there.
    /// `None`: the last tokens. Not with `tree_parent`; attends take [`Mask::Causal`].
    pub query_positions: Option<&'a [i64]>,
}

pub(crate) fn count(n: usize) -> Result<i32> {
    i32::try_from(n).map_err(|_| Error::new(ErrorKind::Invalid, "a count of tokens beyond 2^31"))
}

impl Plan {
    /// Creates a plan of a pool.
    ///
    /// # Errors
    /// Those of every call.
    pub fn new(pool: &Pool) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_plan_create(pool.raw(), ptr::null(), &mut raw, err) })?;
        // SAFETY: not null on success.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        Ok(Plan { raw, pool: pool.clone(), open: false, ids: vec![], new: vec![], queries: vec![], keep: vec![] })
    }

    /// Sets the CUDA stream on which later calls enqueue.
    ///
    /// # Errors
    /// `State` (a step is open; the stream is being captured, and the plan ran on another one), `Unsupported` (on a CPU).
    pub fn set_stream(&mut self, stream: Stream) -> Result<()> {
        // SAFETY: the handle is alive and exclusively borrowed; the stream is as its maker promised.
        call(|err| unsafe { ffi::ta_plan_set_stream(self.raw.as_ptr(), stream.0, err) })
    }

    /// Opens a step on a batch and reserves all memory that it needs. Waits for blocks that come from disk, and for room, up to
    /// [`TierOptions::begin_wait_ms`](crate::TierOptions::begin_wait_ms).
    ///
    /// The step borrows its sequences: nobody forks, moves or releases them before it is over.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn main() -> Result<()> {
    /// # let context = Context::new(ContextOptions::default())?;
    /// # let pool = Pool::new(&context, PoolOptions::new(1, 1, 64, 1 << 20))?;
    /// # let mut plan = Plan::new(&pool)?;
    /// # let (mut a, mut b) = (Sequence::new(&pool)?, Sequence::new(&pool)?);
    /// drop(plan.begin([(&mut a, 100), (&mut b, 1)])?); // new tokens of each
    /// drop(plan.begin([Entry::new(&mut a, 100).queries(1), Entry::new(&mut b, 1)])?); // of `a` the last one alone attends
    /// # let mut batch = vec![a, b];
    /// drop(plan.begin(batch.iter_mut().map(|seq| (seq, 1)))?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// ```compile_fail,E0499
    /// # use turboattention::*;
    /// # fn f(plan: &mut Plan, mut seq: Sequence) -> Result<()> {
    /// let step = plan.begin([(&mut seq, 1)])?;
    /// seq.truncate(0)?; // the step has it
    /// step.end()
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Invalid` (a sequence that is there twice or is of another pool, counts that do not fit), `Stale`, `Busy` (a sequence is
    /// in another open step, or moves keep taking the step's blocks to disk), `TierFull`, `Memory`, `Limit` (too many tokens),
    /// `State` (queries see what windows have passed, or stand before the gap of a shift), `Unsupported` (drafts under
    /// universal open scales, trees in a pool that is batch invariant, query positions of a partitioned sequence), of blocks on
    /// disk `Io` and `Corrupt`, on a GPU `NonFinite` (earlier tokens were not finite; once). Of partitioned sequences also
    /// `Mismatch`, `Cancelled`, `Timeout` and `PeerLost`.
    pub fn begin<'a, I>(&'a mut self, batch: I) -> Result<Step<'a>>
    where
        I: IntoIterator,
        I::Item: Into<Entry<'a>>,
    {
        self.begin_raw(batch, None)
    }

    /// Likewise, with options.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn main() -> Result<()> {
    /// # let context = Context::new(ContextOptions::default())?;
    /// # let pool = Pool::new(&context, PoolOptions::new(1, 1, 64, 1 << 20))?;
    /// # let (mut plan, mut seq, k) = (Plan::new(&pool)?, Sequence::new(&pool)?, [0.5f32; 4 * 64]);
    /// let mut step = plan.begin_with([(&mut seq, 4)], &StepOptions { drafts: Switch::On, ..Default::default() })?;
    /// # step.append(0, Tensor::new(&k, [4, 1, 64])?, Tensor::new(&k, [4, 1, 64])?)?;
    /// step.end_keeping(&[3])?; // three of the four drafts were right
    /// assert_eq!(seq.len()?, 3);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Plan::begin`].
    pub fn begin_with<'a, I>(&'a mut self, batch: I, options: &StepOptions<'_>) -> Result<Step<'a>>
    where
        I: IntoIterator,
        I::Item: Into<Entry<'a>>,
    {
        self.begin_raw(batch, Some(options))
    }

    fn begin_raw<'a, I>(&'a mut self, batch: I, options: Option<&StepOptions<'_>>) -> Result<Step<'a>>
    where
        I: IntoIterator,
        I::Item: Into<Entry<'a>>,
    {
        if self.open {
            self.abort()?; // of a step that was forgotten (mem::forget)
        }
        self.ids.clear();
        self.new.clear();
        self.queries.clear();
        for entry in batch {
            let Entry { seq, new, queries } = entry.into();
            if *seq.pool() != self.pool {
                return Err(Error::new(ErrorKind::Invalid, "a sequence of another pool"));
            }
            self.ids.push(seq.id());
            self.new.push(count(new)?);
            self.queries.push(count(queries.unwrap_or(new))?);
        }
        let n = u32::try_from(self.ids.len()).unwrap_or(u32::MAX);
        let options = options.map(|options| self.step_options(options)).transpose()?;
        let options = options.as_ref().map_or(ptr::null(), |options| options);
        // SAFETY: the handle is alive and exclusively borrowed; the lists have n elements, those of the options an element for each
        // new token and for each query token.
        call(|err| unsafe {
            let (ids, new, queries) = (self.ids.as_ptr(), self.new.as_ptr(), self.queries.as_ptr());
            ffi::ta_plan_begin(self.raw.as_ptr(), n, ids, new, queries, options, err)
        })?;
        self.open = true;
        Ok(Step { device: self.pool.context().device(), plan: self, seqs: PhantomData })
    }

    fn step_options(&self, options: &StepOptions<'_>) -> Result<ffi::ta_step_options> {
        let sum = |list: &[i32]| list.iter().map(|&n| n as u128).sum::<u128>();
        let tree_parent = match options.tree_parent {
            None => ptr::null(),
            Some(parents) if parents.len() as u128 == sum(&self.new) => parents.as_ptr(),
            Some(_) => return Err(Error::new(ErrorKind::Invalid, "a tree needs a parent for each new token")),
        };
        let query_positions = match options.query_positions {
            None => ptr::null(),
            Some(positions) if positions.len() as u128 == sum(&self.queries) => positions.as_ptr(),
            Some(_) => return Err(Error::new(ErrorKind::Invalid, "a step needs a position for each query token")),
        };
        Ok(ffi::ta_step_options {
            wait_ms: options.wait_ms,
            drafts: options.drafts as i32,
            layers_in_order: options.layers_in_order as i32,
            tree_parent,
            query_positions,
            ..ffi::ta_step_options::new()
        })
    }

    fn abort(&mut self) -> Result<()> {
        self.open = false;
        // SAFETY: the handle is alive and exclusively borrowed.
        call(|err| unsafe { ffi::ta_plan_abort(self.raw.as_ptr(), err) })
    }
}

/// Options of [`Step::attend_with`] and [`Context::attend_dense`](crate::Context::attend_dense); make them with
/// `..Default::default()`.
#[derive(Clone, Copy, Default)]
pub struct AttendOptions<'a> {
    /// Which keys a query sees.
    pub mask: Mask,
    /// Multiplies q.k; 0: 1/sqrt(channels).
    pub scale: f32,
    /// c: score = c * tanh(score / c); 0: none.
    pub softcap: f32,
    /// Keys a query sees, its own included; 0: no limit.
    pub window: i64,
    /// ALiBi, [query heads].
    pub alibi_slopes: Option<Floats<'a>>,
    /// Learned sink logits, [query heads].
    pub sinks: Option<Floats<'a>>,
    /// The exponential; default: the pool's.
    pub exp: Exp,
    /// Precision of the probabilities; default: the pool's.
    pub p: P,
}

impl AttendOptions<'_> {
    pub(crate) fn raw(&self, device: DeviceKind, q: &Tensor<'_>) -> Result<ffi::ta_attend_options> {
        let heads = q.raw.heads.max(0) as u128;
        let floats = |floats: &Option<Floats<'_>>| floats.as_ref().map_or(Ok(ptr::null()), |floats| floats.get(device, heads));
        Ok(ffi::ta_attend_options {
            mask: self.mask as i32,
            scale: self.scale,
            softcap: self.softcap,
            window: self.window,
            alibi_slopes: floats(&self.alibi_slopes)?,
            sinks: floats(&self.sinks)?,
            exp: self.exp as i32,
            p: self.p as i32,
            ..ffi::ta_attend_options::new()
        })
    }
}

pub(crate) fn lse_pointer(lse: Option<FloatsMut<'_>>, device: DeviceKind, rows: u128) -> Result<*mut f32> {
    lse.map_or(Ok(ptr::null_mut()), |lse| lse.get(device, rows))
}

/// An open step. If it is dropped without [`Step::end`], it is aborted: sequences are as before it began.
#[must_use = "a step that is dropped is aborted"]
pub struct Step<'a> {
    plan: &'a mut Plan,
    device: DeviceKind,
    seqs: PhantomData<&'a mut Sequence>,
}

impl Step<'_> {
    /// Quantizes the new tokens of a layer and appends them: k and v [sum of new tokens, kv heads, channels] of the layer, the
    /// sequences one after the other, keys after their rotary embedding. Each layer is appended once in a step.
    ///
    /// # Errors
    /// `Invalid` (no such layer; on a GPU memory that it cannot reach), `Shape`, `DType`, `State` (the layer has its append, or
    /// the step is over), `NonFinite` (on a GPU the next begin with the sequence reports it), `Memory`.
    pub fn append(&mut self, layer: u32, k: Tensor<'_>, v: Tensor<'_>) -> Result<()> {
        let (k, v) = (k.get(self.device)?, v.get(self.device)?);
        // SAFETY: the handle is alive and exclusively borrowed; the views are valid for as long as their makers promised.
        call(|err| unsafe { ffi::ta_append(self.plan.raw.as_ptr(), layer, k, v, err) })
    }

    /// Attends with the step's queries to all tokens of their sequences, the new ones included: q and out [sum of queries,
    /// query heads, channels].
    ///
    /// # Errors
    /// `Invalid` (no such layer, an option outside its range, outputs that overlap; on a GPU memory that it cannot reach),
    /// `Shape`, `DType`, `State` (the layer lacks its append), `NonFinite` (on a CPU), `Memory`, `Unsupported` (batch
    /// invariance, shifts and query positions exclude some options; on a GPU more than 16 query heads for each kv head of a
    /// token tree, or where attention is observed), on a GPU `Limit` (too many rows and pages). Of partitioned sequences also
    /// `Mismatch`, `Cancelled`, `Timeout` and `PeerLost`.
    pub fn attend(&mut self, layer: u32, q: Tensor<'_>, out: TensorMut<'_>) -> Result<()> {
        self.attend_raw(layer, &q, &out, None, None)
    }

    /// Likewise; `lse` gets [sum of queries, query heads], the natural log of the denominator, scale and sink included.
    ///
    /// # Errors
    /// As [`Step::attend`].
    pub fn attend_with(
        &mut self,
        layer: u32,
        q: Tensor<'_>,
        out: TensorMut<'_>,
        lse: Option<FloatsMut<'_>>,
        options: &AttendOptions<'_>,
    ) -> Result<()> {
        self.attend_raw(layer, &q, &out, lse, Some(options))
    }

    fn attend_raw(
        &mut self,
        layer: u32,
        q: &Tensor<'_>,
        out: &TensorMut<'_>,
        lse: Option<FloatsMut<'_>>,
        options: Option<&AttendOptions<'_>>,
    ) -> Result<()> {
        let lse = lse_pointer(lse, self.device, q.rows())?;
        let options = options.map(|options| options.raw(self.device, q)).transpose()?;
        let options = options.as_ref().map_or(ptr::null(), |options| options);
        let (q, out) = (q.get(self.device)?, out.get(self.device)?);
        // SAFETY: as append; lse and the options' lists are as long as q's shape, which the library compares with the step,
        // says.
        call(|err| unsafe { ffi::ta_attend(self.plan.raw.as_ptr(), layer, q, out, lse, options, err) })
    }

    /// Commits: the new tokens belong to their sequences. If it fails, the step is aborted.
    ///
    /// # Errors
    /// `State` (a layer lacks its append), `Invalid` (the tokens are a tree), `Memory`, `Device`. Of partitioned sequences also
    /// `Mismatch`, `Cancelled`, `Timeout` and `PeerLost`.
    pub fn end(self) -> Result<()> {
        self.end_raw(ptr::null())
    }

    /// Commits a part of the new tokens of a step with [`StepOptions::drafts`]. `keep` has for each sequence 1 + the index,
    /// among its new tokens, of the last token that stays; this token and its ancestors stay. 0: none stays. If it fails, the
    /// step is aborted.
    ///
    /// # Errors
    /// As [`Step::end`]; `Invalid` also of numbers in `keep` that are too large, and of a step without drafts.
    pub fn end_keeping(self, keep: &[usize]) -> Result<()> {
        if keep.len() != self.plan.ids.len() {
            return Err(Error::new(ErrorKind::Invalid, "a step's end needs a number for each of its sequences"));
        }
        self.plan.keep.clear();
        for &n in keep {
            let n = count(n)?;
            self.plan.keep.push(n);
        }
        let keep = self.plan.keep.as_ptr();
        self.end_raw(keep)
    }

    fn end_raw(self, keep: *const i32) -> Result<()> {
        // SAFETY: the handle is alive and exclusively borrowed; `keep` is null or has an element for each sequence.
        call(|err| unsafe { ffi::ta_plan_end(self.plan.raw.as_ptr(), keep, err) })?;
        self.plan.open = false;
        Ok(())
    }

    /// Gives the step up, as dropping it does.
    ///
    /// # Errors
    /// Those of every call.
    pub fn abort(self) -> Result<()> {
        self.plan.abort()
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.plan.open {
            let _ = self.plan.abort(); // only of a plan that is not open, or in a forked child
        }
    }
}
