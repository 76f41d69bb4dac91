/* XXH3 of 64 bits without seed, as github.com/Cyan4973/xxHash specifies it, for little-endian
   machines: bytes are taken as far as a pass over a value has come, while they are in the cache. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of memory are taken as they lie"
#endif
#define INLINE static inline __attribute__((always_inline))

#define BLOCK 1024 /* bytes between two scrambles */
#define STRIPE 64
#define SHORT 240 /* bytes up to which there are no blocks */
#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct hash {
    uint64_t lanes[8] __attribute__((aligned(64)));
    int64_t size, done; /* bytes of the value, and of the blocks taken so far */
};

INLINE uint64_t word64(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

INLINE uint64_t word32(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

INLINE uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

INLINE uint64_t mixed16(const uint8_t *at, int secret) {
    const uint8_t *key = SECRET + secret;
    return folded(word64(at) ^ word64(key), word64(at + 8) ^ word64(key + 8));
}

INLINE uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ull;
    return h ^ h >> 32;
}

INLINE uint64_t long_avalanche(uint64_t h) {
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}

static uint64_t hash_of_short(const uint8_t *in, int64_t size) {
    const uint8_t *end = in + size;
    uint64_t h = (uint64_t)size * PRIME64_1;
    if (size == 0) return long_avalanche(word64(SECRET + 56) ^ word64(SECRET + 64));
    if (size <= 3) {
        uint64_t bytes = (uint64_t)in[0] << 16 | (uint64_t)in[size >> 1] << 24 | end[-1] |
                         (uint64_t)size << 8;
        return long_avalanche(bytes ^ (word32(SECRET) ^ word32(SECRET + 4)));
    }
    if (size <= 8) {
        h = word32(end - 4) + (word32(in) << 32);
        h ^= word64(SECRET + 8) ^ word64(SECRET + 16);
        h ^= rotated(h, 49) ^ rotated(h, 24);
        h *= 0x9FB21C651E98DF25ull;
        h = (h ^ ((h >> 35) + (uint64_t)size)) * 0x9FB21C651E98DF25ull;
        return h ^ h >> 28;
    }
    if (size <= 16) {
        uint64_t low = word64(in) ^ (word64(SECRET + 24) ^ word64(SECRET + 32));
        uint64_t high = word64(end - 8) ^ (word64(SECRET + 40) ^ word64(SECRET + 48));
        return avalanche((uint64_t)size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size <= 128) {
        for (int i = (int)(size - 1) / 32; i >= 0; i--)
            h += mixed16(in + 16 * i, 32 * i) + mixed16(end - 16 * (i + 1), 32 * i + 16);
        return avalanche(h);
    }
    for (int i = 0; i < 8; i++) h += mixed16(in + 16 * i, 16 * i);
    h = avalanche(h);
    for (int i = 8; i < size / 16; i++) h += mixed16(in + 16 * i, 16 * (i - 8) + 3);
    return avalanche(h + mixed16(end - 16, 136 - 17));
}

INLINE void take_stripe(uint64_t *lanes, const uint8_t *in, const uint8_t *secret) {
#if defined(__AVX512F__)
    __m512i data = _mm512_loadu_si512(in), key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    __m512i sum = _mm512_add_epi64(_mm512_load_si512(lanes), _mm512_shuffle_epi32(data, 0x4e));
    _mm512_store_si512(lanes, _mm512_add_epi64(sum, product));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        __m256i *at = (__m256i *)lanes + i, data = _mm256_loadu_si256((const __m256i *)in + i);
        __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret + i));
        __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
        __m256i sum = _mm256_add_epi64(_mm256_load_si256(at), _mm256_shuffle_epi32(data, 0x4e));
        _mm256_store_si256(at, _mm256_add_epi64(sum, product));
    }
#else
    for (int i = 0; i < 8; i++) {
        uint64_t data = word64(in + 8 * i), key = data ^ word64(secret + 8 * i);
        lanes[i ^ 1] += data;
        lanes[i] += (key & 0xffffffff) * (key >> 32);
    }
#endif
}

INLINE void take_block(uint64_t *lanes, const uint8_t *in) {
    uint64_t held[8] __attribute__((aligned(64)));
    memcpy(held, lanes, sizeof held); /* in registers through the block */
    for (int i = 0; i < BLOCK / STRIPE; i++) {
        __builtin_prefetch(in + BLOCK + STRIPE * i); /* whose memory that is does not matter */
        take_stripe(held, in + STRIPE * i, SECRET + 8 * i);
    }
    for (int i = 0; i < 8; i++) {
        uint64_t lane = held[i];
        lanes[i] = (lane ^ lane >> 47 ^ word64(SECRET + 128 + 8 * i)) * PRIME32_1;
    }
}

static void hash_begin(struct hash *h, int64_t size) {
    static const uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                      PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(h->lanes, lanes, sizeof lanes);
    h->size = size, h->done = 0;
}

/* Takes the whole blocks of the value at `in` that lie before byte `end`. */
INLINE void hash_until(struct hash *h, const uint8_t *in, int64_t end) {
    if (h->size <= SHORT) return;
    /* the last byte never belongs to a block that is taken here */
    if (end > h->size - 1) end = h->size - 1;
    for (; h->done + BLOCK <= end; h->done += BLOCK) take_block(h->lanes, in + h->done);
}

/* Returns the hash. Only bytes from `done` - STRIPE on are looked at. */
static uint64_t hash_end(struct hash *h, const uint8_t *in) {
    if (h->size <= SHORT) return hash_of_short(in, h->size);
    hash_until(h, in, h->size);
    for (int i = 0; h->done + STRIPE * (i + 1) <= h->size - 1; i++)
        take_stripe(h->lanes, in + h->done + STRIPE * i, SECRET + 8 * i);
    take_stripe(h->lanes, in + h->size - STRIPE, SECRET + 192 - STRIPE - 7);
    uint64_t merged = (uint64_t)h->size * PRIME64_1;
    for (int i = 0; i < 4; i++)
        merged += folded(h->lanes[2 * i] ^ word64(SECRET + 11 + 16 * i),
                         h->lanes[2 * i + 1] ^ word64(SECRET + 11 + 16 * i + 8));
    return avalanche(merged);
}
