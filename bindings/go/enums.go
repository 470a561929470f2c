package turboattention

// #include <turboattention.h>
import "C"

// DType is the type of a tensor's elements.
type DType int32

const (
	F16  DType = C.TA_DTYPE_F16
	BF16 DType = C.TA_DTYPE_BF16
	F32  DType = C.TA_DTYPE_F32
)

// Device says what a context computes on.
type Device int32

const (
	CPU  Device = C.TA_DEVICE_CPU
	CUDA Device = C.TA_DEVICE_CUDA
)

// ISA says which CPU kernels run; all give the same integers.
type ISA int32

const (
	ISAAuto    ISA = C.TA_CPU_ISA_AUTO
	ISAScalar  ISA = C.TA_CPU_ISA_SCALAR
	ISAAVX2    ISA = C.TA_CPU_ISA_AVX2
	ISAAVXVNNI ISA = C.TA_CPU_ISA_AVX_VNNI
	ISAAVX512  ISA = C.TA_CPU_ISA_AVX512
	ISAAMX     ISA = C.TA_CPU_ISA_AMX
)

// LogLevel is how detailed a message is.
type LogLevel int32

const (
	LogError   LogLevel = C.TA_LOG_ERROR
	LogWarning LogLevel = C.TA_LOG_WARNING
	LogInfo    LogLevel = C.TA_LOG_INFO
	LogDebug   LogLevel = C.TA_LOG_DEBUG
)

// Switch is a setting that a profile decides unless it is given.
type Switch int32

const (
	Default Switch = C.TA_DEFAULT
	On      Switch = C.TA_ON
	Off     Switch = C.TA_OFF
)

// Profile is a set of numeric settings; docs/numerics.md has the table.
type Profile int32

const (
	ProfileAccurate Profile = C.TA_PROFILE_ACCURATE
	ProfilePaper    Profile = C.TA_PROFILE_PAPER
)

// Granularity says what shares one INT8 scale.
type Granularity int32

const (
	GranularityDefault Granularity = C.TA_GRANULARITY_DEFAULT
	GranularityToken   Granularity = C.TA_GRANULARITY_TOKEN
	GranularityPage    Granularity = C.TA_GRANULARITY_PAGE
	GranularityTensor  Granularity = C.TA_GRANULARITY_TENSOR
)

// OpenScale is the scale of tokens that join a page that is not full.
type OpenScale int32

const (
	OpenScaleDefault   OpenScale = C.TA_OPEN_SCALE_DEFAULT
	OpenScaleToken     OpenScale = C.TA_OPEN_SCALE_TOKEN
	OpenScaleUniversal OpenScale = C.TA_OPEN_SCALE_UNIVERSAL
)

// Exp is the exponential of the softmax.
type Exp int32

const (
	ExpDefault Exp = C.TA_EXP_DEFAULT
	ExpPoly    Exp = C.TA_EXP_POLY
	ExpExact   Exp = C.TA_EXP_EXACT
	ExpSAS     Exp = C.TA_EXP_SAS
)

// P is the precision of the probabilities that multiply V.
type P int32

const (
	PDefault      P = C.TA_P_DEFAULT
	PAuto         P = C.TA_P_AUTO
	PU8           P = C.TA_P_U8
	PU16          P = C.TA_P_U16
	PS8127        P = C.TA_P_S8_127
	PS8119        P = C.TA_P_S8_119
	PS8127Running P = C.TA_P_S8_127_RUNNING
	PU8Running    P = C.TA_P_U8_RUNNING
)

// NonFinite says what NaN, Inf and magnitudes above 2^56 in q, k and v do.
type NonFinite int32

const (
	NonFiniteDefault  NonFinite = C.TA_NONFINITE_DEFAULT
	NonFiniteReject   NonFinite = C.TA_NONFINITE_REJECT
	NonFiniteSaturate NonFinite = C.TA_NONFINITE_SATURATE
)

// Mask says which keys a query sees.
type Mask int32

const (
	MaskCausal Mask = C.TA_MASK_CAUSAL
	MaskFull   Mask = C.TA_MASK_FULL
)

// Tier is where blocks lie; docs/tiers.md.
type Tier int32

const (
	TierDevice Tier = C.TA_TIER_DEVICE
	TierHost   Tier = C.TA_TIER_HOST
	TierDisk   Tier = C.TA_TIER_DISK
	TierPeer   Tier = C.TA_TIER_PEER // between device and host
)

// TierState is what a tier can do now.
type TierState int32

const (
	TierOK       TierState = C.TA_TIER_OK
	TierReadOnly TierState = C.TA_TIER_READ_ONLY
	TierFailed   TierState = C.TA_TIER_FAILED
)

// Eviction says which blocks leave a full tier first.
type Eviction int32

const (
	EvictLRU       Eviction = C.TA_EVICT_LRU
	EvictPriority  Eviction = C.TA_EVICT_PRIORITY
	EvictAttention Eviction = C.TA_EVICT_ATTENTION
)

// Staging says whether steps on a GPU copy host pages to the device before they read them.
type Staging int32

const (
	StagingAuto   Staging = C.TA_STAGING_AUTO
	StagingNever  Staging = C.TA_STAGING_NEVER
	StagingAlways Staging = C.TA_STAGING_ALWAYS
)

// RotaryPairs says which channels of a head a rotary embedding turns together.
type RotaryPairs int32

const (
	RotaryHalves   RotaryPairs = C.TA_ROTARY_HALVES   // i and i + channels/2
	RotaryAdjacent RotaryPairs = C.TA_ROTARY_ADJACENT // 2i and 2i + 1
)

// EventKind says what became of a published block.
type EventKind int32

const (
	EventReset     EventKind = C.TA_PREFIX_RESET
	EventPublished EventKind = C.TA_PREFIX_PUBLISHED
	EventDropped   EventKind = C.TA_PREFIX_DROPPED
	EventMoved     EventKind = C.TA_PREFIX_MOVED
)

// MoveState is how far a move or a transfer is.
type MoveState int32

const (
	MoveQueued    MoveState = C.TA_MOVE_QUEUED
	MoveRunning   MoveState = C.TA_MOVE_RUNNING
	MoveDone      MoveState = C.TA_MOVE_DONE
	MoveFailed    MoveState = C.TA_MOVE_FAILED
	MoveCancelled MoveState = C.TA_MOVE_CANCELLED
)

// MetricsFormat is the text that [Pool.Metrics] writes.
type MetricsFormat int32

const (
	OpenMetrics MetricsFormat = C.TA_METRICS_OPENMETRICS
	JSON        MetricsFormat = C.TA_METRICS_JSON
)

// GroupKind says how the ranks of a group reach each other.
type GroupKind int32

const (
	GroupLocal GroupKind = C.TA_GROUP_LOCAL
	GroupHost  GroupKind = C.TA_GROUP_HOST
	GroupNCCL  GroupKind = C.TA_GROUP_NCCL
)

// Route is how blocks go between two ranks.
type Route int32

const (
	RouteHostMemory Route = C.TA_ROUTE_HOST_MEMORY
	RouteGPUMemory  Route = C.TA_ROUTE_GPU_MEMORY
	RouteNCCL       Route = C.TA_ROUTE_NCCL
)

// GroupState says whether a group can be used.
type GroupState int32

const (
	GroupConnecting GroupState = C.TA_GROUP_CONNECTING
	GroupReady      GroupState = C.TA_GROUP_READY
	GroupEnded      GroupState = C.TA_GROUP_ENDED
)

// SendMode says what becomes of a sequence that is sent.
type SendMode int32

const (
	SendCopy SendMode = C.TA_SEND_COPY
	SendMove SendMode = C.TA_SEND_MOVE
)

// Answer is what is known of a block in a group.
type Answer int32

const (
	AnswerUnknown Answer = C.TA_PREFIX_UNKNOWN // ask again; never the same as AnswerNo
	AnswerNo      Answer = C.TA_PREFIX_NO
	AnswerYes     Answer = C.TA_PREFIX_YES
)

// StoreResult is what became of an item of a store.
type StoreResult int32

const (
	StoreFailed StoreResult = C.TA_STORE_FAILED
	StoreAbsent StoreResult = C.TA_STORE_ABSENT // there is no value of this key
	StoreDone   StoreResult = C.TA_STORE_DONE   // Exists: there is one; else done
)

// Output says which ranks get the results of attention over a partitioned sequence.
type Output int32

const (
	OutputAll   Output = C.TA_OUTPUT_ALL
	OutputHeads Output = C.TA_OUTPUT_HEADS
	OutputOne   Output = C.TA_OUTPUT_ONE
)

// DenseVariant says how [Context.AttendDense] quantizes, or that it groups channels.
type DenseVariant int32

const (
	DenseInt8Page     DenseVariant = C.TA_DENSE_INT8_PAGE
	DenseIntFlash     DenseVariant = C.TA_DENSE_INT_FLASH
	DenseIntFlashHalf DenseVariant = C.TA_DENSE_INT_FLASH_HALF
	DenseDistr        DenseVariant = C.TA_DENSE_DISTR
)
