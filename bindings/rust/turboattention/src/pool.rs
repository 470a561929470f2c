use std::ffi::{CStr, CString, OsStr};
use std::fmt;
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use crate::error::call;
use crate::wake::Watcher;
use crate::{
    ffi, Context, DeviceKind, Error, ErrorKind, Eviction, Exp, Granularity, NonFinite, OpenScale, Profile, Result, RotaryPairs,
    Staging, Switch, P,
};

/// The numeric settings of a pool; docs/numerics.md explains them. Make them with `..Default::default()`, which is what the
/// profile says.
#[derive(Clone, Debug, Default)]
pub struct Numerics {
    /// Decides every field below that is at its default.
    pub profile: Profile,
    /// What shares a scale of K.
    pub k_granularity: Granularity,
    /// What shares a scale of V.
    pub v_granularity: Granularity,
    /// The scale of tokens that join a page.
    pub open_scale: OpenScale,
    /// A power-of-two scale for each token of V.
    pub v_exponents: Switch,
    /// Zero points in fractions of an INT8 step.
    pub fractional_zero: Switch,
    /// The encoder looks for V's scale and zero of least squared error.
    pub v_search: Switch,
    /// Randomized Hadamard rotation of Q and K.
    pub hadamard: Switch,
    /// Blocks at the start of a sequence that stay 8 bits; -1: none; 0: as the profile says.
    pub sink_blocks: i32,
    /// The exponential in P.
    pub exp: Exp,
    /// Precision of P.
    pub p: P,
    /// What values do that are not finite.
    pub nonfinite: NonFinite,
    /// Which signs the rotation has; 0: the default.
    pub hadamard_seed: u64,
    /// [layers, kv heads, channels] subtracted from K, each layer with its own shape.
    pub k_offset: Option<Vec<f32>>,
    /// Pairs of K channels that turn from token to token are kept apart.
    pub k_turning: Switch,
    /// `v_search` for K's 2-bit heads.
    pub k_search: Switch,
    /// 4- and 2-bit values have slope 1 on the INT8 ones.
    pub unit_slope: Switch,
    /// Bits of queries in decode, against K at 8 bits: 8 or 15; 0: the profile's.
    pub q_bits: u32,
    /// A token's results have the same bits in every step; off by default.
    pub batch_invariant: Switch,
}

impl Numerics {
    /// The C struct, for a pool whose K has so many channels in all heads and layers. It points into `self`.
    fn raw(&self, channels: i128) -> Result<ffi::ta_numerics> {
        Ok(ffi::ta_numerics {
            profile: self.profile as i32,
            k_granularity: self.k_granularity as i32,
            v_granularity: self.v_granularity as i32,
            open_scale: self.open_scale as i32,
            v_exponents: self.v_exponents as i32,
            fractional_zero: self.fractional_zero as i32,
            v_search: self.v_search as i32,
            hadamard: self.hadamard as i32,
            sink_blocks: self.sink_blocks,
            exp: self.exp as i32,
            p: self.p as i32,
            nonfinite: self.nonfinite as i32,
            hadamard_seed: self.hadamard_seed,
            k_offset: pointer(&self.k_offset, channels)?,
            k_turning: self.k_turning as i32,
            k_search: self.k_search as i32,
            unit_slope: self.unit_slope as i32,
            q_bits: self.q_bits,
            batch_invariant: self.batch_invariant as i32,
            ..ffi::ta_numerics::new()
        })
    }

    /// What C told, and the offsets that it points to.
    fn known(n: &ffi::ta_numerics, k_offset: Option<&[f32]>) -> Result<Self> {
        Ok(Numerics {
            profile: Profile::known(n.profile)?,
            k_granularity: Granularity::known(n.k_granularity)?,
            v_granularity: Granularity::known(n.v_granularity)?,
            open_scale: OpenScale::known(n.open_scale)?,
            v_exponents: Switch::known(n.v_exponents)?,
            fractional_zero: Switch::known(n.fractional_zero)?,
            v_search: Switch::known(n.v_search)?,
            hadamard: Switch::known(n.hadamard)?,
            sink_blocks: n.sink_blocks,
            exp: Exp::known(n.exp)?,
            p: P::known(n.p)?,
            nonfinite: NonFinite::known(n.nonfinite)?,
            hadamard_seed: n.hadamard_seed,
            k_offset: k_offset.map(<[f32]>::to_vec),
            k_turning: Switch::known(n.k_turning)?,
            k_search: Switch::known(n.k_search)?,
            unit_slope: Switch::known(n.unit_slope)?,
            q_bits: n.q_bits,
            batch_invariant: Switch::known(n.batch_invariant)?,
        })
    }
}

/// Memory below the device tier; docs/tiers.md explains it. Make them with `..Default::default()`; a field that is 0 or `None`
/// is at its default.
#[derive(Clone, Debug, Default)]
pub struct TierOptions {
    /// 1 + the NUMA node of the host tier.
    pub host_node: u32,
    /// Budget of the host tier; 0: none.
    pub host_bytes: u64,
    /// Budget of the disk tier; 0: none.
    pub disk_bytes: u64,
    /// Where a disk tier's file without a name is.
    pub disk_folder: Option<PathBuf>,
    /// A step that ends with more than this of the device budget in use makes blocks leave.
    pub high_percent: i32,
    /// Until no more than this is in use.
    pub low_percent: i32,
    /// Which blocks leave first.
    pub eviction: Eviction,
    /// The file of a disk tier that lasts.
    pub disk_path: Option<PathBuf>,
    /// Where no tier has room, blocks are lost.
    pub drop_coldest: Switch,
    /// How long a begin waits for room and for moves, in milliseconds; -1: not at all.
    pub begin_wait_ms: i32,
    /// Whether steps on a GPU copy what they read in host memory.
    pub staging: Staging,
    /// Full blocks lose bits as they are demoted.
    pub falling_precision: Switch,
    /// A context of another device, whose memory holds a peer tier. The pool keeps it.
    pub peer: Option<Context>,
    /// Budget of the peer tier; 0: none.
    pub peer_bytes: u64,
}

impl TierOptions {
    /// What C is told. It points to the paths, which are those of `self`.
    fn raw(&self, disk_folder: Option<&CStr>, disk_path: Option<&CStr>) -> ffi::ta_tier_options {
        ffi::ta_tier_options {
            host_node: self.host_node,
            host_bytes: self.host_bytes,
            disk_bytes: self.disk_bytes,
            disk_folder: disk_folder.map_or(ptr::null(), CStr::as_ptr),
            high_percent: self.high_percent,
            low_percent: self.low_percent,
            eviction: self.eviction as i32,
            disk_path: disk_path.map_or(ptr::null(), CStr::as_ptr),
            drop_coldest: self.drop_coldest as i32,
            begin_wait_ms: self.begin_wait_ms,
            staging: self.staging as i32,
            falling_precision: self.falling_precision as i32,
            peer: self.peer.as_ref().map_or(ptr::null_mut(), Context::raw),
            peer_bytes: self.peer_bytes,
            ..ffi::ta_tier_options::new()
        }
    }

    /// What C told, the paths that it points to, and the context of the peer tier.
    fn known(t: &ffi::ta_tier_options, folder: Option<&CStr>, path: Option<&CStr>, peer: Option<Context>) -> Result<Self> {
        let owned = |path: &CStr| PathBuf::from(OsStr::from_bytes(path.to_bytes()));
        Ok(TierOptions {
            host_node: t.host_node,
            host_bytes: t.host_bytes,
            disk_bytes: t.disk_bytes,
            disk_folder: folder.map(owned),
            high_percent: t.high_percent,
            low_percent: t.low_percent,
            eviction: Eviction::known(t.eviction)?,
            disk_path: path.map(owned),
            drop_coldest: Switch::known(t.drop_coldest)?,
            begin_wait_ms: t.begin_wait_ms,
            staging: Staging::known(t.staging)?,
            falling_precision: Switch::known(t.falling_precision)?,
            peer,
            peer_bytes: t.peer_bytes,
        })
    }
}

/// Layers `first..first + layers`: a window, and a shape that differs from the pool's. Make them with `..Default::default()`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerGroup {
    /// The first layer.
    pub first: u32,
    /// How many, 1 and up.
    pub layers: u32,
    /// The most keys that a query of these layers sees; 0: no limit. When a block has passed, the pages of layers with windows
    /// are given back.
    pub window: i64,
    /// 1 to 1024; 0: the pool's.
    pub kv_heads: u32,
    /// Channels of q and k, and of v unless `v_head_dim` is given: 16 to 256, a multiple of 8; 0: the pool's.
    pub head_dim: u32,
    /// Channels of v and of the output; 0: `head_dim`, and where that is 0, too, the pool's.
    pub v_head_dim: u32,
}

impl LayerGroup {
    /// What C is told.
    pub(crate) fn raw(&self) -> ffi::ta_layer_group {
        ffi::ta_layer_group {
            first: self.first,
            layers: self.layers,
            window: self.window,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
            ..ffi::ta_layer_group::new()
        }
    }

    /// What C told.
    fn known(g: &ffi::ta_layer_group) -> Self {
        LayerGroup {
            first: g.first,
            layers: g.layers,
            window: g.window,
            kv_heads: g.kv_heads,
            head_dim: g.head_dim,
            v_head_dim: g.v_head_dim,
        }
    }
}

/// The rotary embedding that callers apply to Q and K, for [`Sequence::shift`](crate::Sequence::shift): at position p pair i
/// (x, y) of a head has become (x cos(a p) - y sin(a p), x sin(a p) + y cos(a p)), where a is the pair's angle.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rotary {
    /// Which channels are turned together.
    pub pairs: RotaryPairs,
    /// The first ones of a head, which are turned: even, 2 to the least `head_dim` of the layers.
    pub channels: u32,
    /// [layers, channels / 2] radians for each position, -1024 to 1024; or [channels / 2] for all layers.
    pub angles: Vec<f64>,
}

impl Rotary {
    /// What C is told, of a pool with so many layers.
    fn raw(&self, layers: u32) -> Result<ffi::ta_rotary> {
        let (pairs, n) = (u64::from(self.channels / 2), self.angles.len() as u64);
        let layers = if n == pairs { 1 } else { layers };
        if n != u64::from(layers) * pairs {
            let text = "a rotary embedding needs channels / 2 angles for each layer, or for all";
            return Err(Error::new(ErrorKind::Shape, text));
        }
        Ok(ffi::ta_rotary {
            pairs: self.pairs as i32,
            channels: self.channels,
            layers,
            angles: self.angles.as_ptr(),
            ..ffi::ta_rotary::new()
        })
    }

    /// What C told, and the angles that it points to.
    fn known(r: &ffi::ta_rotary, angles: &[f64]) -> Result<Self> {
        Ok(Rotary { pairs: RotaryPairs::known(r.pairs)?, channels: r.channels, angles: angles.to_vec() })
    }
}

/// How many elements maps over all layers have: one for each head, and one for each channel of K.
pub(crate) fn map_sizes(layers: u32, kv_heads: u32, head_dim: u32, groups: &[LayerGroup]) -> (i128, i128) {
    let (layers, pool_heads, pool_dim) = (i128::from(layers), i128::from(kv_heads), i128::from(head_dim));
    let or = |own: u32, common: i128| if own == 0 { common } else { i128::from(own) };
    let sizes = (layers * pool_heads, layers * pool_heads * pool_dim);
    groups.iter().fold(sizes, |(heads, channels), g| {
        let (n, own_heads, own_dim) = (i128::from(g.layers), or(g.kv_heads, pool_heads), or(g.head_dim, pool_dim));
        (heads + n * (own_heads - pool_heads), channels + n * (own_heads * own_dim - pool_heads * pool_dim))
    })
}

/// Options of [`Pool::new`].
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// 1 to 4096.
    pub layers: u32,
    /// 1 to 1024.
    pub kv_heads: u32,
    /// Channels of q and k, and of v unless `v_head_dim` is given: 16 to 256, a multiple of 8.
    pub head_dim: u32,
    /// 8, 4 or 2 for every head; 0: 4.
    pub bits: u32,
    /// [layers, kv heads of the layer], in place of `bits`.
    pub k_bits: Option<Vec<u8>>,
    /// Likewise.
    pub v_bits: Option<Vec<u8>>,
    /// Of the device tier.
    pub budget_bytes: u64,
    /// 0: 65536.
    pub max_sequences: u32,
    /// How values are stored and computed.
    pub numerics: Numerics,
    /// `None`: the device tier alone.
    pub tiers: Option<TierOptions>,
    /// Channels of v and of the output; 0: `head_dim`.
    pub v_head_dim: u32,
    /// Ranges of layers with a window or a shape of their own, of distinct layers.
    pub layer_groups: Vec<LayerGroup>,
    /// `None`: sequences cannot be shifted.
    pub rotary: Option<Rotary>,
}

impl PoolOptions {
    /// What is required; the rest is at its default.
    pub fn new(layers: u32, kv_heads: u32, head_dim: u32, budget_bytes: u64) -> Self {
        PoolOptions { layers, kv_heads, head_dim, budget_bytes, ..Default::default() }
    }
}

/// All that another holder of a pool may want to know.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PoolDescription {
    /// The values in effect instead of defaults; only granularities may be at their default. A pool that is created with these
    /// is the same.
    pub options: PoolOptions,
    /// What the pool's context computes on.
    pub device: DeviceKind,
    /// Which GPU.
    pub device_ordinal: i32,
    /// Pools with the same one exchange files and sequences.
    pub fingerprint: u64,
    /// Bytes of a block of 8 bits, all layers.
    pub token_block_bytes: u64,
    /// Bytes of a block of the bits of the pool; 0: there are none.
    pub channel_block_bytes: u64,
    /// Bytes of a block that has lost bits; 0: there are none.
    pub low_block_bytes: u64,
    /// Channels that blocks have: 64, 96, 128 or 256.
    pub block_head_dim: u32,
    /// Bytes of a block of 8 bits without the pages of layers with windows; 0: there are none.
    pub passed_token_block_bytes: u64,
    /// Likewise of the bits of the pool.
    pub passed_channel_block_bytes: u64,
}

/// A cache: the blocks of many sequences in one budget. Clones are the same pool.
#[derive(Clone)]
pub struct Pool(pub(crate) Arc<Handle>);

pub(crate) struct Handle {
    pub(crate) raw: NonNull<ffi::ta_kv_pool>,
    pub(crate) context: Context,
    peer: Option<Context>,
    pub(crate) watcher: Watcher,
}

// SAFETY: calls on one ta_kv_pool may overlap, from any thread; it is destroyed once nobody has it.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the only destroy of the handle.
        unsafe { ffi::ta_kv_pool_destroy(self.raw.as_ptr()) }
    }
}

/// A path for C.
pub(crate) fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Error::new(ErrorKind::Invalid, "a path with a NUL in it"))
}

fn pointer<T>(list: &Option<Vec<T>>, len: i128) -> Result<*const T> {
    match list {
        None => Ok(ptr::null()),
        Some(list) if list.len() as i128 == len => Ok(list.as_ptr()),
        Some(_) => Err(Error::new(
            ErrorKind::Shape,
            "a map of bits or offsets does not have the length that layers, heads and channels give",
        )),
    }
}

impl PoolOptions {
    // The shape alone; it points to the groups, which are those of these options.
    pub(crate) fn raw_shape(&self, groups: &[ffi::ta_layer_group]) -> ffi::ta_kv_pool_options {
        ffi::ta_kv_pool_options {
            layers: self.layers,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
            layer_groups: groups.as_ptr(),
            n_layer_groups: u32::try_from(groups.len()).unwrap_or(u32::MAX),
            ..ffi::ta_kv_pool_options::new()
        }
    }
}

impl Pool {
    /// Creates an empty pool.
    ///
    /// # Errors
    /// `Invalid`, `Shape` (a map of another length), `Unsupported`, `Memory`; of the tiers also `TierFull` (no space for the
    /// file), `Io`, `Limit` (threads), `Busy` (another pool has the file), `Corrupt` (the file is damaged).
    pub fn new(context: &Context, options: PoolOptions) -> Result<Self> {
        let (heads, channels) = map_sizes(options.layers, options.kv_heads, options.head_dim, &options.layer_groups);
        let numerics = options.numerics.raw(channels)?;
        let path = |path: fn(&TierOptions) -> &Option<PathBuf>| {
            options.tiers.as_ref().and_then(|tiers| path(tiers).as_deref()).map(c_path).transpose()
        };
        let (folder, file) = (path(|tiers| &tiers.disk_folder)?, path(|tiers| &tiers.disk_path)?);
        let tiers = options.tiers.as_ref().map(|tiers| tiers.raw(folder.as_deref(), file.as_deref()));
        let groups: Vec<_> = options.layer_groups.iter().map(LayerGroup::raw).collect();
        let rotary = options.rotary.as_ref().map(|rotary| rotary.raw(options.layers)).transpose()?;
        let raw_options = ffi::ta_kv_pool_options {
            bits: options.bits,
            k_bits: pointer(&options.k_bits, heads)?,
            v_bits: pointer(&options.v_bits, heads)?,
            budget_bytes: options.budget_bytes,
            max_sequences: options.max_sequences,
            numerics: &numerics,
            tiers: tiers.as_ref().map_or(ptr::null(), |tiers| tiers),
            rotary: rotary.as_ref().map_or(ptr::null(), |rotary| rotary),
            ..options.raw_shape(&groups)
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is alive; the options, and the maps and strings that they point to, live for the call.
        call(|err| unsafe { ffi::ta_kv_pool_create(context.raw(), &raw_options, &mut raw, err) })?;
        drop((folder, file));
        // SAFETY: not null on success.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        let peer = options.tiers.and_then(|tiers| tiers.peer);
        Ok(Pool(Arc::new(Handle { raw, context: context.clone(), peer, watcher: Watcher::default() })))
    }

    /// Ends the pool for all its users: its sequences are released, published blocks are dropped, and calls on it and on its
    /// plans fail with [`ErrorKind::Closed`], also a begin that waits.
    ///
    /// # Errors
    /// `Closed`: it is closed already.
    pub fn close(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_kv_pool_close(self.raw(), err) })
    }

    /// The context that it was created in.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// The C handle, for calls of [`ffi`]. It lives as long as this.
    pub fn raw(&self) -> *mut ffi::ta_kv_pool {
        self.0.raw.as_ptr()
    }

    /// What the pool is.
    ///
    /// # Errors
    /// Those of every call.
    pub fn describe(&self) -> Result<PoolDescription> {
        let (d, parts) = self.describe_raw()?;
        let tiers = parts.tiers.map(|t| TierOptions::known(t, parts.disk_folder, parts.disk_path, self.0.peer.clone()));
        let rotary = parts.rotary.map(|(r, angles)| Rotary::known(r, angles));
        Ok(PoolDescription {
            options: PoolOptions {
                layers: d.layers,
                kv_heads: d.kv_heads,
                head_dim: d.head_dim,
                bits: d.bits,
                k_bits: Some(parts.k_bits.to_vec()),
                v_bits: Some(parts.v_bits.to_vec()),
                budget_bytes: d.budget_bytes,
                max_sequences: d.max_sequences,
                numerics: Numerics::known(parts.numerics, parts.k_offset)?,
                tiers: tiers.transpose()?,
                v_head_dim: d.v_head_dim,
                layer_groups: parts.layer_groups,
                rotary: rotary.transpose()?,
            },
            device: DeviceKind::known(d.device)?,
            device_ordinal: d.device_ordinal,
            fingerprint: d.fingerprint,
            token_block_bytes: d.token_block_bytes,
            channel_block_bytes: d.channel_block_bytes,
            low_block_bytes: d.low_block_bytes,
            block_head_dim: d.block_head_dim,
            passed_token_block_bytes: d.passed_token_block_bytes,
            passed_channel_block_bytes: d.passed_channel_block_bytes,
        })
    }

    /// The description in C, and what its pointers lead to.
    fn describe_raw(&self) -> Result<(ffi::ta_kv_pool_description, Parts<'_>)> {
        let mut d = ffi::ta_kv_pool_description::new();
        // SAFETY: the handle is alive, `d` writable.
        call(|err| unsafe { ffi::ta_kv_pool_describe(self.raw(), &mut d, err) })?;
        // SAFETY: what the pointers lead to lives as long as the handle, and has the lengths that the header says.
        let parts = unsafe {
            // They lie struct_size bytes apart.
            let group_at = |i: u32| {
                let stride = (*d.layer_groups).struct_size as usize;
                &*d.layer_groups.cast::<u8>().add(i as usize * stride).cast::<ffi::ta_layer_group>()
            };
            let layer_groups: Vec<_> = (0..d.n_layer_groups).map(|i| LayerGroup::known(group_at(i))).collect();
            let (heads, channels) = map_sizes(d.layers, d.kv_heads, d.head_dim, &layer_groups);
            let (numerics, tiers) = (&*d.numerics, d.tiers.as_ref());
            let text = |text: *const c_char| (!text.is_null()).then(|| CStr::from_ptr(text));
            let angles = |r: &ffi::ta_rotary| slice::from_raw_parts(r.angles, r.layers as usize * (r.channels / 2) as usize);
            Parts {
                numerics,
                k_offset: (!numerics.k_offset.is_null()).then(|| slice::from_raw_parts(numerics.k_offset, channels as usize)),
                tiers,
                disk_folder: tiers.and_then(|t| text(t.disk_folder)),
                disk_path: tiers.and_then(|t| text(t.disk_path)),
                rotary: d.rotary.as_ref().map(|r| (r, angles(r))),
                layer_groups,
                k_bits: slice::from_raw_parts(d.k_bits, heads as usize),
                v_bits: slice::from_raw_parts(d.v_bits, heads as usize),
            }
        };
        Ok((d, parts))
    }
}

/// What the description of a pool points to, which lives as long as the pool.
struct Parts<'a> {
    numerics: &'a ffi::ta_numerics,
    k_offset: Option<&'a [f32]>,
    tiers: Option<&'a ffi::ta_tier_options>,
    disk_folder: Option<&'a CStr>,
    disk_path: Option<&'a CStr>,
    /// With its angles.
    rotary: Option<(&'a ffi::ta_rotary, &'a [f64])>,
    layer_groups: Vec<LayerGroup>,
    k_bits: &'a [u8],
    v_bits: &'a [u8],
}

impl PartialEq for Pool {
    /// Whether it is the same pool.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
impl Eq for Pool {}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.raw()).finish()
    }
}
