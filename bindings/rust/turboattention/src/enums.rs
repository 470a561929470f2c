use crate::ffi;

macro_rules! enums {
    ($($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $value:ident,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(i32)]
        pub enum $name {
            $($(#[$variant_meta])* $variant = ffi::$value,)*
        }

        impl $name {
            /// `None`: a value of a newer library.
            #[allow(dead_code)]
            pub(crate) fn from_raw(value: i32) -> Option<Self> {
                match value {
                    $(ffi::$value => Some(Self::$variant),)*
                    _ => None,
                }
            }

            #[allow(dead_code)]
            pub(crate) fn known(value: i32) -> crate::Result<Self> {
                Self::from_raw(value).ok_or_else(|| crate::Error::unknown_value(stringify!($name), value))
            }
        }
    )*};
}

enums! {
    /// The type of a tensor's elements.
    DType {
        /// IEEE half.
        F16 = TA_DTYPE_F16,
        /// The upper half of an `f32`.
        Bf16 = TA_DTYPE_BF16,
        /// `f32`.
        F32 = TA_DTYPE_F32,
    }
    /// What a context computes on.
    #[derive(Default)]
    DeviceKind {
        /// The CPU.
        #[default]
        Cpu = TA_DEVICE_CPU,
        /// An NVIDIA GPU from sm_80 on.
        Cuda = TA_DEVICE_CUDA,
    }
    /// Which CPU kernels run; all give the same integers.
    #[derive(Default)]
    CpuIsa {
        /// The best that this CPU has.
        #[default]
        Auto = TA_CPU_ISA_AUTO,
        /// Any CPU.
        Scalar = TA_CPU_ISA_SCALAR,
        /// AVX2.
        Avx2 = TA_CPU_ISA_AVX2,
        /// AVX2 with VNNI.
        AvxVnni = TA_CPU_ISA_AVX_VNNI,
        /// AVX-512 with VNNI.
        Avx512 = TA_CPU_ISA_AVX512,
        /// AMX-INT8 beside AVX-512.
        Amx = TA_CPU_ISA_AMX,
    }
    /// How detailed a message is.
    #[derive(PartialOrd, Ord)]
    LogLevel {
        /// Something failed.
        Error = TA_LOG_ERROR,
        /// Something is not as it should be.
        Warning = TA_LOG_WARNING,
        /// What an operator wants to know.
        Info = TA_LOG_INFO,
        /// What a developer wants to know.
        Debug = TA_LOG_DEBUG,
    }
    /// A setting that a profile decides unless it is given.
    #[derive(Default)]
    Switch {
        /// As the profile says.
        #[default]
        Default = TA_DEFAULT,
        /// On.
        On = TA_ON,
        /// Off.
        Off = TA_OFF,
    }
    /// A set of numeric settings; docs/numerics.md has the table.
    #[derive(Default)]
    Profile {
        /// What loses least.
        #[default]
        Accurate = TA_PROFILE_ACCURATE,
        /// TurboAttention as published.
        Paper = TA_PROFILE_PAPER,
    }
    /// What shares one INT8 scale.
    #[derive(Default)]
    Granularity {
        /// As the profile or the variant says.
        #[default]
        Default = TA_GRANULARITY_DEFAULT,
        /// Each token of a head.
        Token = TA_GRANULARITY_TOKEN,
        /// The 64 tokens of a head's page.
        Page = TA_GRANULARITY_PAGE,
        /// All tokens of a head; of V in dense attention only.
        Tensor = TA_GRANULARITY_TENSOR,
    }
    /// The scale of tokens that join a page that is not full.
    #[derive(Default)]
    OpenScale {
        /// As the profile says.
        #[default]
        Default = TA_OPEN_SCALE_DEFAULT,
        /// Each token has its own.
        Token = TA_OPEN_SCALE_TOKEN,
        /// One for each page, fixed by its first token that is not zero.
        Universal = TA_OPEN_SCALE_UNIVERSAL,
    }
    /// The exponential of the softmax.
    #[derive(Default)]
    Exp {
        /// As the pool or the profile says.
        #[default]
        Default = TA_EXP_DEFAULT,
        /// A cubic; relative error up to 1.03e-4.
        Poly = TA_EXP_POLY,
        /// Within 2 ulp.
        Exact = TA_EXP_EXACT,
        /// TurboAttention's sparse activated softmax.
        Sas = TA_EXP_SAS,
    }
    /// Precision of the probabilities that multiply V.
    #[derive(Default)]
    P {
        /// As the pool or the profile says.
        #[default]
        Default = TA_P_DEFAULT,
        /// `U16` up to 16 rows, `U8` beyond.
        Auto = TA_P_AUTO,
        /// 255 levels.
        U8 = TA_P_U8,
        /// 65535 levels.
        U16 = TA_P_U16,
        /// 127 levels.
        S8_127 = TA_P_S8_127,
        /// 119 levels.
        S8_119 = TA_P_S8_119,
        /// 127 levels of the running maximum: wrong on flat contexts.
        S8_127Running = TA_P_S8_127_RUNNING,
        /// 255 levels of the running maximum.
        U8Running = TA_P_U8_RUNNING,
    }
    /// What NaN, Inf and magnitudes above 2^56 in q, k and v do.
    #[derive(Default)]
    NonFinite {
        /// `Reject`.
        #[default]
        Default = TA_NONFINITE_DEFAULT,
        /// The call fails; on a GPU a later one.
        Reject = TA_NONFINITE_REJECT,
        /// They are replaced and counted.
        Saturate = TA_NONFINITE_SATURATE,
    }
    /// Which keys a query sees.
    #[derive(Default)]
    Mask {
        /// Those up to its own.
        #[default]
        Causal = TA_MASK_CAUSAL,
        /// All.
        Full = TA_MASK_FULL,
    }
    /// Where blocks lie; docs/tiers.md.
    Tier {
        /// The memory of the context's device.
        Device = TA_TIER_DEVICE,
        /// Host memory.
        Host = TA_TIER_HOST,
        /// A file.
        Disk = TA_TIER_DISK,
        /// The memory of another device, between the first two.
        Peer = TA_TIER_PEER,
    }
    /// What a tier can do now.
    TierState {
        /// Everything.
        Ok = TA_TIER_OK,
        /// What it holds can be read; it tries by itself to write again.
        ReadOnly = TA_TIER_READ_ONLY,
        /// Nothing.
        Failed = TA_TIER_FAILED,
    }
    /// Which blocks leave a full tier first.
    #[derive(Default)]
    Eviction {
        /// Those of the sequence that was not used for longest.
        #[default]
        Lru = TA_EVICT_LRU,
        /// Those of the sequence of lowest priority.
        Priority = TA_EVICT_PRIORITY,
        /// Those with the least attention.
        Attention = TA_EVICT_ATTENTION,
    }
    /// Whether steps on a GPU copy host pages to the device before they read them.
    #[derive(Default)]
    Staging {
        /// Whichever is predicted to be faster.
        #[default]
        Auto = TA_STAGING_AUTO,
        /// Never.
        Never = TA_STAGING_NEVER,
        /// Always.
        Always = TA_STAGING_ALWAYS,
    }
    /// Which channels of a head a rotary embedding turns together.
    #[derive(Default)]
    RotaryPairs {
        /// i and i + channels / 2.
        #[default]
        Halves = TA_ROTARY_HALVES,
        /// 2 i and 2 i + 1.
        Adjacent = TA_ROTARY_ADJACENT,
    }
    /// What became of a published block.
    PrefixEventKind {
        /// Forget what earlier events said.
        Reset = TA_PREFIX_RESET,
        /// It is there.
        Published = TA_PREFIX_PUBLISHED,
        /// It is gone.
        Dropped = TA_PREFIX_DROPPED,
        /// It is in another tier.
        Moved = TA_PREFIX_MOVED,
    }
    /// How far a move or a transfer is.
    MoveState {
        /// Not begun; of a transfer: no other rank has answered yet.
        Queued = TA_MOVE_QUEUED,
        /// On the way.
        Running = TA_MOVE_RUNNING,
        /// Finished.
        Done = TA_MOVE_DONE,
        /// Finished; something failed.
        Failed = TA_MOVE_FAILED,
        /// Finished; it was cancelled.
        Cancelled = TA_MOVE_CANCELLED,
    }
    /// The text of [`Pool::metrics`](crate::Pool::metrics).
    MetricsFormat {
        /// For a scraper: <https://openmetrics.io>.
        OpenMetrics = TA_METRICS_OPENMETRICS,
        /// One JSON object.
        Json = TA_METRICS_JSON,
    }
    /// How the ranks of a group reach each other.
    #[derive(Default)]
    GroupKind {
        /// All are in this process.
        #[default]
        Local = TA_GROUP_LOCAL,
        /// In processes of one host and user.
        Host = TA_GROUP_HOST,
        /// On any hosts, each with a GPU, through NCCL.
        Nccl = TA_GROUP_NCCL,
    }
    /// How blocks go between two ranks.
    PeerRoute {
        /// Through host memory.
        HostMemory = TA_ROUTE_HOST_MEMORY,
        /// Each GPU reads the memory of the other.
        GpuMemory = TA_ROUTE_GPU_MEMORY,
        /// Through host memory of both and NCCL.
        Nccl = TA_ROUTE_NCCL,
    }
    /// Whether a group can be used.
    GroupState {
        /// Not all ranks have joined.
        Connecting = TA_GROUP_CONNECTING,
        /// It can.
        Ready = TA_GROUP_READY,
        /// Not any more.
        Ended = TA_GROUP_ENDED,
    }
    /// What becomes of a sequence that is sent.
    #[derive(Default)]
    SendMode {
        /// The source keeps it, and may go on with it at once.
        #[default]
        Copy = TA_SEND_COPY,
        /// It is as in an open step until the other rank has it; then calls on it fail with [`ErrorKind::Stale`](crate::ErrorKind).
        Move = TA_SEND_MOVE,
    }
    /// What became of an item of a store.
    #[derive(Default)]
    StoreResult {
        /// It failed.
        Failed = TA_STORE_FAILED,
        /// There is no value of this key.
        #[default]
        Absent = TA_STORE_ABSENT,
        /// `exists`: there is one; else done.
        Done = TA_STORE_DONE,
    }
    /// What is known of a block in a group.
    PrefixAnswer {
        /// Some rank has not told what it has: ask again.
        Unknown = TA_PREFIX_UNKNOWN,
        /// Nobody has it.
        No = TA_PREFIX_NO,
        /// A rank has it.
        Yes = TA_PREFIX_YES,
    }
    /// Which ranks get the results of attention over a partitioned sequence.
    #[derive(Default)]
    PartitionOutput {
        /// Each rank gets all of them, the same bits.
        #[default]
        All = TA_OUTPUT_ALL,
        /// Each rank gets its share of the query heads.
        Heads = TA_OUTPUT_HEADS,
        /// One rank gets all of them.
        One = TA_OUTPUT_ONE,
    }
    /// How dense attention quantizes, or that it groups channels.
    #[derive(Default)]
    DenseVariant {
        /// TurboAttention.
        #[default]
        Int8Page = TA_DENSE_INT8_PAGE,
        /// INT-FlashAttention, full INT8.
        IntFlash = TA_DENSE_INT_FLASH,
        /// INT-FlashAttention, half INT8.
        IntFlashHalf = TA_DENSE_INT_FLASH_HALF,
        /// DistrAttention: channels are grouped, nothing is quantized.
        Distr = TA_DENSE_DISTR,
    }
}
