/* The reference implementation, unmodified. Its functions get a prefix, since a program may link another copy. */
#define blake2s ta_blake2s_reference
#define blake2s_init ta_blake2s_reference_init
#define blake2s_init_key ta_blake2s_reference_init_key
#define blake2s_init_param ta_blake2s_reference_init_param
#define blake2s_update ta_blake2s_reference_update
#define blake2s_final ta_blake2s_reference_final

#include "third_party/blake2/blake2s-ref.c"
