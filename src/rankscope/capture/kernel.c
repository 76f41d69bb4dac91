/* One pass over a value: its hash (hash.c), extrema, sums, zeros and the eight projections of its
   sketch, row by row while the row is in the cache.

   A value is [before, samples, after, inner]: `inner` columns with float32 factors, rows with float64
   weights. Values are added up in float32 lanes over 512 columns at most, then in double. Four rows
   share every load of a factor. What float32 sums cannot do (NaN, infinities, magnitudes whose
   squares leave its range, and words of 32 bits and more that are no float32) is added up in double,
   four times slower; doubles whose squares leave the range of double are refused, and numpy takes
   them.

   Plain C99 with the vector extensions of GCC and Clang: any machine they know. Compile without
   -ffast-math, which would take the NaN away. */

#if defined(__AVX512F__)
#define LANES 16
#define AT_ONCE 4 /* projections of four rows whose accumulators fit the registers */
#elif defined(__AVX2__)
#define LANES 8
#define AT_ONCE 3
#elif defined(__aarch64__)
#define LANES 4
#define AT_ONCE 4
#else
#define LANES 4
#define AT_ONCE 2
#endif

#define SKETCH 8
#define ROWS 4
#define CHUNK 512
#define MOST_SAMPLES 64
#define LARGE 1e15
#define SMALL 1e-12
#define CANCELLATION 0.25
/* Compilers would load a value once more for every product: two loads a cycle, two products. */
#if defined(__AVX2__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v) ((void)0)
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (quad_int){i, j, k, l})
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t vec_int __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t quad_int __attribute__((vector_size(16)));
typedef double quad_double __attribute__((vector_size(32)));
/* As wide as `vec`: half of its floats. */
#define WIDE (LANES / 2)
typedef double vec_double __attribute__((vector_size(4 * LANES)));
typedef int64_t vec_long __attribute__((vector_size(4 * LANES)));
typedef float half_vec __attribute__((vector_size(2 * LANES)));

enum { FLOAT32, BFLOAT16, FLOAT16, UINT8, INT8, INT16, UINT16, TABLE, FLOAT64, INT32, INT64, UINT32 };
static const int WIDTHS[] = {4, 2, 2, 1, 1, 2, 2, 1, 8, 4, 8, 4};

/* Mirrored by `_KernelPlan` in kernel.py. */
struct plan {
    int64_t kind, before, samples, after, inner;
    int64_t pitch;        /* of the factors, a multiple of 16, zeros behind `inner` */
    int64_t weight_pitch; /* of the weights */
    const float *factors; /* [8, pitch] */
    const double *weights; /* [8, weight_pitch], one for every row */
    const double *batch;  /* [samples, 8]; NULL: one sample, and it is the whole */
    const float *table;   /* values of the 256 words of an 8-bit float */
};

/* Mirrored by `_NUMBERS` and its neighbours in kernel.py. */
struct result {
    uint64_t raw, hash; /* of the bytes; of the bytes without -0 and the payloads of NaN */
    int64_t nan, posinf, neginf, zero;
    double low, high, mean, std, norm, deviation;
    double sketch[SKETCH];
    double rows[MOST_SAMPLES * SKETCH];
    float rows32[MOST_SAMPLES * SKETCH];
};

struct sums {
    vec low, high;
    vec_int zero, least;
    double total[LANES], squares[LANES];
    /* of the elements behind the last whole vector of a row */
    double tail_low, tail_high, tail_total, tail_squares;
    int64_t tail_zero, tail_minus;
};

INLINE vec load(const float *at) {
    vec v;
    memcpy(&v, at, sizeof v);
    return v;
}

/* C has no ?: of vectors, and compilers see no minimum in what can be said instead. */
#if defined(__AVX512F__)
INLINE vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec_int smaller_int(vec_int a, vec_int b) {
    return (vec_int)_mm512_min_epi32((__m512i)a, (__m512i)b);
}
#elif defined(__AVX2__)
INLINE vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vec_int smaller_int(vec_int a, vec_int b) {
    return (vec_int)_mm256_min_epi32((__m256i)a, (__m256i)b);
}
#else
INLINE vec chosen(vec_int is_first, vec a, vec b) {
    return (vec)((is_first & (vec_int)a) | (~is_first & (vec_int)b));
}
INLINE vec smaller(vec a, vec b) { return chosen(a < b, a, b); }
INLINE vec larger(vec a, vec b) { return chosen(a > b, a, b); }
INLINE vec_int smaller_int(vec_int a, vec_int b) {
    vec_int is_less = a < b;
    return (is_less & a) | (~is_less & b);
}
#endif

INLINE void widen(double *into, vec lanes) {
    float held[LANES];
    memcpy(held, &lanes, sizeof held);
    for (int i = 0; i < LANES; i++) into[i] += held[i];
}

INLINE void look_at(const float *x, ptrdiff_t n, struct sums *s) {
    vec total = {0}, squares = {0}, low = s->low, high = s->high;
    const vec none = {0};
    vec_int zero = s->zero, least = s->least;
    ptrdiff_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        vec a = load(x + i), b = load(x + i + LANES);
        vec c = load(x + i + 2 * LANES), d = load(x + i + 3 * LANES);
        total += (a + b) + (c + d);
        squares += (a * a + b * b) + (c * c + d * d);
        low = smaller(smaller(smaller(a, b), smaller(c, d)), low);
        high = larger(larger(larger(a, b), larger(c, d)), high);
        zero += ((a == none) + (b == none)) + ((c == none) + (d == none));
        least = smaller_int(smaller_int(smaller_int((vec_int)a, (vec_int)b),
                                        smaller_int((vec_int)c, (vec_int)d)), least);
    }
    for (; i + LANES <= n; i += LANES) {
        vec a = load(x + i);
        total += a;
        squares += a * a;
        low = smaller(a, low);
        high = larger(a, high);
        zero += a == none;
        least = smaller_int((vec_int)a, least);
    }
    s->low = low, s->high = high, s->zero = zero, s->least = least;
    widen(s->total, total);
    widen(s->squares, squares);
    for (; i < n; i++) {
        double v = x[i];
        s->tail_total += v;
        s->tail_squares += v * v;
        s->tail_low = v < s->tail_low ? v : s->tail_low;
        s->tail_high = v > s->tail_high ? v : s->tail_high;
        s->tail_zero += v == 0.0;
        s->tail_minus |= v == 0.0 && __builtin_signbit(v);
    }
}

INLINE quad halved(vec v) {
#if LANES == 4
    return v;
#else
    quad part[LANES / 4];
    memcpy(part, &v, sizeof part);
#if LANES == 16
    return (part[0] + part[1]) + (part[2] + part[3]);
#else
    return part[0] + part[1];
#endif
#endif
}

/* The lane sums of four vectors. */
INLINE quad sums_of_four(vec v0, vec v1, vec v2, vec v3) {
    quad a = halved(v0), b = halved(v1), c = halved(v2), d = halved(v3);
    quad ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    quad cd = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(ab, cd, 0, 1, 4, 5) + SHUFFLE(ab, cd, 2, 3, 6, 7);
}

/* Adds `count` weighted projections of four rows of n columns, n a multiple of LANES. Meanwhile
   `fetched` rows from `next` on are fetched; whose memory that is does not matter. */
INLINE void project_some(int count, const float *x, ptrdiff_t step, ptrdiff_t n, uintptr_t next,
                         int fetched,
                         const float *factors, ptrdiff_t pitch, const double *weights,
                         ptrdiff_t weight_pitch, quad_double *sketch) {
    vec sums[4][ROWS] = {{{0}}};
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        vec factor[4];
        for (int p = 0; p < count; p++) {
            factor[p] = load(factors + p * pitch + i);
            IN_REGISTER(factor[p]);
        }
        if (next)
            for (int r = 0; r < fetched; r++)
                __builtin_prefetch((const void *)(next + (uintptr_t)((r * step + i) * 4)));
        for (int r = 0; r < ROWS; r++) {
            vec v = load(x + r * step + i);
            IN_REGISTER(v);
            for (int p = 0; p < count; p++) sums[p][r] += v * factor[p];
        }
    }
    for (int p = 0; p < count; p++) {
        quad rows = sums_of_four(sums[p][0], sums[p][1], sums[p][2], sums[p][3]);
        quad_double weight;
        memcpy(&weight, weights + p * weight_pitch, sizeof weight);
        sketch[p] += __builtin_convertvector(rows, quad_double) * weight;
    }
}

INLINE void project_four(const float *x, ptrdiff_t step, ptrdiff_t n, uintptr_t next,
                         const float *factors, ptrdiff_t pitch, const double *weights,
                         ptrdiff_t weight_pitch, quad_double *sketch) {
    const int first = SKETCH % AT_ONCE ? SKETCH % AT_ONCE : AT_ONCE;
    const uintptr_t row = (uintptr_t)step * 4;
    project_some(first, x, step, n, next, 1, factors, pitch, weights, weight_pitch, sketch);
    for (int k = first; k < SKETCH; k += AT_ONCE)
        project_some(AT_ONCE, x, step, n, next ? next + (k == first ? 1 : 3) * row : 0,
                     k == first ? 2 : 1, factors + k * pitch, pitch, weights + k * weight_pitch,
                     weight_pitch, sketch + k);
}

INLINE void project_one(const float *x, ptrdiff_t n, const float *factors, ptrdiff_t pitch,
                        const double *weights, ptrdiff_t weight_pitch, quad_double *sketch) {
    vec sums[SKETCH] = {{0}};
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        vec v = load(x + i);
        for (int k = 0; k < SKETCH; k++) sums[k] += v * load(factors + k * pitch + i);
    }
    for (int k = 0; k < SKETCH; k += 4) {
        quad of = sums_of_four(sums[k], sums[k + 1], sums[k + 2], sums[k + 3]);
        for (int p = 0; p < 4; p++) sketch[k + p][0] += of[p] * weights[(k + p) * weight_pitch];
    }
}

static void convert(const struct plan *p, const void *values, int64_t at, ptrdiff_t n, float *into) {
    switch (p->kind) {
    case FLOAT32:
        memcpy(into, (const float *)values + at, (size_t)n * sizeof(float));
        break;
    case BFLOAT16: {
        const uint16_t *words = (const uint16_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) {
            uint32_t bits = (uint32_t)words[i] << 16;
            memcpy(into + i, &bits, 4);
        }
        break;
    }
    case FLOAT16: {
        const uint16_t *words = (const uint16_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) {
            /* exponent and mantissa moved into place are the value divided by 2**112 */
            uint32_t bits = (uint32_t)(words[i] & 0x7fff) << 13;
            uint32_t beyond = bits >= 0x0f800000 ? 0x7f800000 : 0;
            float value;
            memcpy(&value, &bits, 4);
            value *= 0x1p112f;
            memcpy(&bits, &value, 4);
            bits |= beyond | (uint32_t)(words[i] & 0x8000) << 16;
            memcpy(into + i, &bits, 4);
        }
        break;
    }
    case UINT8: {
        const uint8_t *words = (const uint8_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) into[i] = words[i];
        break;
    }
    case INT8: {
        const int8_t *words = (const int8_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) into[i] = words[i];
        break;
    }
    case INT16: {
        const int16_t *words = (const int16_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) into[i] = words[i];
        break;
    }
    case UINT16: {
        const uint16_t *words = (const uint16_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) into[i] = words[i];
        break;
    }
    default: {
        const uint8_t *words = (const uint8_t *)values + at;
        for (ptrdiff_t i = 0; i < n; i++) into[i] = p->table[words[i]];
    }
    }
}

/* Hashes and looks at a group of rows, all of one sample, and adds their weighted projections. */
static void look_at_rows(const struct plan *p, const void *values, int64_t first, int64_t count,
                         struct hash *hash, struct sums *s, double *sketch) {
    const int64_t row_bytes = p->inner * WIDTHS[p->kind];
    quad_double lanes[SKETCH] = {{0}};
    float copy[ROWS * CHUNK] __attribute__((aligned(64)));
    for (int64_t row = 0; row < count;) {
        int at_once = count - row >= ROWS ? ROWS : 1;
        if (hash) hash_until(hash, values, (first + row + at_once) * row_bytes);
        for (int64_t column = 0; column < p->inner; column += CHUNK) {
            ptrdiff_t n = p->inner - column < CHUNK ? p->inner - column : CHUNK;
            ptrdiff_t padded = (n + LANES - 1) / LANES * LANES;
            int64_t at = (first + row) * p->inner + column;
            const float *x = copy;
            ptrdiff_t step = padded;
            uintptr_t next = 0;
            if (p->kind == FLOAT32 && n == padded) {
                x = (const float *)values + at;
                next = (uintptr_t)(x + (n < p->inner ? n : ROWS * n));
                step = p->inner;
            } else {
                for (int r = 0; r < at_once; r++) {
                    convert(p, values, at + r * p->inner, n, copy + r * padded);
                    for (ptrdiff_t i = n; i < padded; i++) copy[r * padded + i] = 0.0f;
                }
            }
            if (at_once == ROWS && step == n && n * ROWS <= CHUNK)
                look_at(x, ROWS * n, s);
            else
                for (int r = 0; r < at_once; r++) look_at(x + r * step, n, s);
            const float *factors = p->factors + column;
            const double *weights = p->weights + first + row;
            if (at_once == ROWS)
                project_four(x, step, padded, next, factors, p->pitch, weights, p->weight_pitch,
                             lanes);
            else
                project_one(x, padded, factors, p->pitch, weights, p->weight_pitch, lanes);
        }
        row += at_once;
    }
    for (int k = 0; k < SKETCH; k++)
        sketch[k] += (lanes[k][0] + lanes[k][1]) + (lanes[k][2] + lanes[k][3]);
}

/* Sums x - center and its square: what is left where the mean is far larger than the spread. */
static void sum_around(const struct plan *p, const void *values, int64_t count, float center,
                       double *total, double *squares) {
    float copy[CHUNK] __attribute__((aligned(64)));
    double totals[LANES] = {0}, all_squares[LANES] = {0};
    vec middle = {0};
    middle += center;
    for (int64_t at = 0; at < count; at += CHUNK) {
        ptrdiff_t n = count - at < CHUNK ? count - at : CHUNK, i = 0;
        const float *x = copy;
        if (p->kind == FLOAT32)
            x = (const float *)values + at;
        else
            convert(p, values, at, n, copy);
        vec sum = {0}, square = {0};
        for (; i + 2 * LANES <= n; i += 2 * LANES) {
            vec a = load(x + i) - middle, b = load(x + i + LANES) - middle;
            sum += a + b;
            square += a * a + b * b;
        }
        widen(totals, sum);
        widen(all_squares, square);
        for (; i < n; i++) {
            double away = (double)x[i] - (double)center;
            *total += away;
            *squares += away * away;
        }
    }
    for (int i = 0; i < LANES; i++) *total += totals[i], *squares += all_squares[i];
}

INLINE int is_wide(const struct plan *p) { return p->kind >= FLOAT64; }

static void convert_wide(const struct plan *p, const void *values, int64_t at, ptrdiff_t n,
                         double *into) {
    float copy[CHUNK];
    switch (p->kind) {
    case FLOAT64:
        memcpy(into, (const double *)values + at, (size_t)n * sizeof(double));
        break;
    case INT32:
        for (ptrdiff_t i = 0; i < n; i++) into[i] = ((const int32_t *)values)[at + i];
        break;
    case INT64:
        for (ptrdiff_t i = 0; i < n; i++) into[i] = (double)((const int64_t *)values)[at + i];
        break;
    case UINT32:
        for (ptrdiff_t i = 0; i < n; i++) into[i] = ((const uint32_t *)values)[at + i];
        break;
    default:
        convert(p, values, at, n, copy);
        for (ptrdiff_t i = 0; i < n; i++) into[i] = copy[i];
    }
}

INLINE vec_double load_wide(const double *at) {
    vec_double v;
    memcpy(&v, at, sizeof v);
    return v;
}

INLINE vec_double chosen_wide(vec_long is_first, vec_double a, vec_double b) {
    return (vec_double)((is_first & (vec_long)a) | (~is_first & (vec_long)b));
}

INLINE double sum_of_wide(vec_double v) {
    double sum = 0.0;
    for (int i = 0; i < WIDE; i++) sum += v[i];
    return sum;
}

/* What a careful look adds up: every sum in double, elements that are not finite left out. */
struct careful_sums {
    int64_t finite, nan, posinf, neginf, zero;
    int minus;
    double low, high, total, squares;
};

/* Adds n elements, and puts 0 in the place of those that are not finite, and behind the last. */
static void look_carefully_at(double *x, ptrdiff_t n, struct careful_sums *s) {
    const double infinity = __builtin_inf();
    ptrdiff_t padded = (n + WIDE - 1) / WIDE * WIDE;
    for (ptrdiff_t i = n; i < padded; i++) x[i] = infinity; /* counted, then taken away again */
    vec_double total = {0}, squares = {0}, low = {0}, high = {0};
    const vec_double none = {0};
    vec_double largest = {0};
    largest += __DBL_MAX__;
    vec_long finite = {0}, zero = {0}, minus = {0}, nan = {0}, posinf = {0};
    low += infinity, high -= infinity;
    for (ptrdiff_t i = 0; i < padded; i += WIDE) {
        vec_double v = load_wide(x + i), w;
        vec_long is_finite = v - v == none;
        w = (vec_double)((vec_long)v & is_finite);
        memcpy(x + i, &w, sizeof w);
        finite -= is_finite;
        nan -= v != v;
        posinf -= v > largest;
        zero -= v == none;
        minus |= (v == none) & (vec_long)v;
        low = chosen_wide((v < low) & is_finite, v, low);
        high = chosen_wide((v > high) & is_finite, v, high);
        total += w;
        squares += w * w;
    }
    int64_t others = padded, behind = padded - n;
    for (int i = 0; i < WIDE; i++) {
        s->finite += finite[i], s->zero += zero[i], s->minus |= minus[i] < 0;
        s->nan += nan[i], s->posinf += posinf[i];
        others -= finite[i] + nan[i] + posinf[i];
        s->low = low[i] < s->low ? low[i] : s->low;
        s->high = high[i] > s->high ? high[i] : s->high;
    }
    s->posinf -= behind;
    s->neginf += others;
    s->total += sum_of_wide(total);
    s->squares += sum_of_wide(squares);
}

static void look_carefully(const struct plan *p, const void *values, struct hash *hash,
                           struct careful_sums *s, double *sketch_of_rows) {
    const int64_t row_bytes = p->inner * WIDTHS[p->kind];
    const int64_t rows = p->before * p->samples * p->after;
    double x[CHUNK] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row++) {
        double *sketch = sketch_of_rows + row / p->after % p->samples * SKETCH;
        if (hash) hash_until(hash, values, (row + 1) * row_bytes);
        for (int64_t column = 0; column < p->inner; column += CHUNK) {
            ptrdiff_t n = p->inner - column < CHUNK ? p->inner - column : CHUNK;
            convert_wide(p, values, row * p->inner + column, n, x);
            look_carefully_at(x, n, s);
            const float *factors = p->factors + column;
            vec_double sums[SKETCH] = {{0}};
            for (ptrdiff_t i = 0; i < n; i += WIDE) {
                vec_double v = load_wide(x + i);
                for (int k = 0; k < SKETCH; k++) {
                    half_vec factor;
                    memcpy(&factor, factors + k * p->pitch + i, sizeof factor);
                    sums[k] += v * __builtin_convertvector(factor, vec_double);
                }
            }
            for (int k = 0; k < SKETCH; k++)
                sketch[k] += sum_of_wide(sums[k]) * p->weights[k * p->weight_pitch + row];
        }
    }
}

/* Sums x - center and its square over the finite elements. */
static void sum_carefully_around(const struct plan *p, const void *values, int64_t count,
                                 double center, double *total, double *squares) {
    double x[CHUNK] __attribute__((aligned(64)));
    vec_double totals = {0}, all_squares = {0}, middle = {0};
    const vec_double none = {0};
    middle += center;
    for (int64_t at = 0; at < count; at += CHUNK) {
        ptrdiff_t n = count - at < CHUNK ? count - at : CHUNK;
        convert_wide(p, values, at, n, x);
        for (; n % WIDE; n++) x[n] = center;
        for (ptrdiff_t i = 0; i < n; i += WIDE) {
            vec_double away = load_wide(x + i) - middle;
            away = (vec_double)((vec_long)away & (away - away == none));
            totals += away;
            all_squares += away * away;
        }
    }
    *total = sum_of_wide(totals), *squares = sum_of_wide(all_squares);
}

/* Writes n words of the value from `at` on, -0 as 0 and every NaN as one. */
static void normalize(const struct plan *p, const void *values, int64_t at, ptrdiff_t n, void *into) {
    memcpy(into, (const uint8_t *)values + at * WIDTHS[p->kind], (size_t)n * WIDTHS[p->kind]);
    uint16_t *halves = into;
    uint8_t *bytes = into;
    float *floats = into;
    double *doubles = into;
    int zero = -1, none = -1;
    uint16_t infinity = p->kind == FLOAT16 ? 0x7c00 : 0x7f80;
    switch (p->kind) {
    case FLOAT32:
        for (ptrdiff_t i = 0; i < n; i++)
            floats[i] = floats[i] == 0 ? 0 : floats[i] != floats[i] ? __builtin_nanf("") : floats[i];
        break;
    case FLOAT64:
        for (ptrdiff_t i = 0; i < n; i++)
            doubles[i] = doubles[i] == 0 ? 0 : doubles[i] != doubles[i] ? __builtin_nan("") : doubles[i];
        break;
    case FLOAT16:
    case BFLOAT16:
        for (ptrdiff_t i = 0; i < n; i++) {
            uint16_t magnitude = halves[i] & 0x7fff;
            halves[i] = !magnitude ? 0 : magnitude <= infinity ? halves[i]
                                                               : p->kind == FLOAT16 ? 0x7e00 : 0x7fc0;
        }
        break;
    case TABLE: /* all words of one value become the first of them */
        for (int word = 255; word >= 0; word--) {
            if (p->table[word] == 0) zero = word;
            if (p->table[word] != p->table[word]) none = word;
        }
        for (ptrdiff_t i = 0; i < n; i++) {
            float v = p->table[bytes[i]];
            bytes[i] = v == 0 ? (uint8_t)zero : v != v ? (uint8_t)none : bytes[i];
        }
    }
}

static uint64_t normalized_hash(const struct plan *p, const void *values, int64_t size) {
    struct hash hash;
    uint8_t words[BLOCK + BLOCK] __attribute__((aligned(64)));
    int64_t width = WIDTHS[p->kind], begin = 0;
    hash_begin(&hash, size);
    if (size > SHORT)
        for (; hash.done + BLOCK < size; hash.done += BLOCK) {
            normalize(p, values, hash.done / width, BLOCK / width, words);
            take_block(hash.lanes, words);
        }
    begin = hash.done >= STRIPE ? hash.done - STRIPE : 0; /* the last stripe may begin before it */
    normalize(p, values, begin / width, (size - begin) / width, words);
    return hash_end(&hash, words - begin);
}

enum { READ, KNOWN, REFUSED };

/* Measures a value. With `wants_hash` and `expected` the bytes are hashed first, and KNOWN returned
   where that is their hash: then `out` holds `raw` alone. REFUSED: `out` holds `raw` alone. */
static int measure(const struct plan *p, const void *values, int wants_hash,
                   const uint64_t *expected, struct result *out) {
    const double infinity = __builtin_inf();
    const int64_t count = p->before * p->samples * p->after * p->inner;
    struct hash hash, *unhashed = wants_hash && !expected ? &hash : NULL;
    hash_begin(&hash, count * WIDTHS[p->kind]);
    if (expected && (out->raw = hash_end(&hash, values)) == *expected) return KNOWN;
    const size_t row_sums = (size_t)p->samples * SKETCH * sizeof(double);
    struct careful_sums c = {.low = infinity, .high = -infinity};
    double mean = 0.0, around = 0.0;
    int is_careful = is_wide(p);
    if (!is_careful) {
        struct sums s;
        memset(&s, 0, sizeof s);
        s.low += (float)infinity, s.high -= (float)infinity, s.least += INT32_MAX;
        s.tail_low = infinity, s.tail_high = -infinity;
        memset(out->rows, 0, row_sums);
        for (int64_t b = 0; b < p->before; b++)
            for (int64_t sample = 0; sample < p->samples; sample++)
                look_at_rows(p, values, (b * p->samples + sample) * p->after, p->after, unhashed, &s,
                             out->rows + sample * SKETCH);
        c.low = s.tail_low, c.high = s.tail_high, c.total = s.tail_total;
        c.squares = s.tail_squares, c.zero = s.tail_zero, c.minus = s.tail_minus != 0;
        c.finite = count;
        for (int i = 0; i < LANES; i++) {
            c.low = s.low[i] < c.low ? s.low[i] : c.low;
            c.high = s.high[i] > c.high ? s.high[i] : c.high;
            c.total += s.total[i];
            c.squares += s.squares[i];
            c.zero -= s.zero[i];
            c.minus |= s.least[i] == INT32_MIN;
        }
        double reach = c.high > -c.low ? c.high : -c.low;
        /* extrema pass over a NaN, sums do not; a NaN makes every comparison false */
        is_careful = !(c.squares < LARGE * LARGE * 1e15) || !(reach < LARGE) ||
                     (reach > 0.0 && reach < SMALL);
        mean = c.total / (double)count, around = c.squares - c.total * mean;
        if (!is_careful && around < CANCELLATION * c.squares) {
            float center = (float)mean;
            double rest = 0.0, rest_squares = 0.0;
            sum_around(p, values, count, center, &rest, &rest_squares);
            around = rest_squares - rest * rest / (double)count;
            mean = (double)center + rest / (double)count;
        }
    }
    if (is_careful) {
        c = (struct careful_sums){.low = infinity, .high = -infinity};
        memset(out->rows, 0, row_sums);
        look_carefully(p, values, is_wide(p) ? unhashed : NULL, &c, out->rows);
        mean = c.finite ? c.total / (double)c.finite : __builtin_nan("");
        around = c.finite ? c.squares - c.total * mean : 0.0;
        if (around < CANCELLATION * c.squares) {
            double center = mean, rest = 0.0, rest_squares = 0.0;
            sum_carefully_around(p, values, count, center, &rest, &rest_squares);
            around = rest_squares - rest * rest / (double)c.finite;
            mean = center + rest / (double)c.finite;
        }
        if (!c.finite) c.low = c.high = mean;
    }
    if (!expected && wants_hash) out->raw = hash_end(&hash, values);
    double reach = c.high > -c.low ? c.high : -c.low;
    if (p->kind == FLOAT64 && c.finite && (!(reach < 1e150) || (reach > 0.0 && reach < 1e-150)))
        return REFUSED;
    out->hash = out->raw;
    if (wants_hash && (c.minus || c.nan)) out->hash = normalized_hash(p, values, hash.size);
    out->nan = c.nan, out->posinf = c.posinf, out->neginf = c.neginf, out->zero = c.zero;
    out->low = c.low, out->high = c.high, out->mean = mean;
    out->norm = __builtin_sqrt(c.squares);
    out->deviation = __builtin_sqrt(around > 0.0 ? around : 0.0);
    out->std = c.finite > 1 ? out->deviation / __builtin_sqrt((double)(c.finite - 1))
                            : __builtin_nan("");
    for (int k = 0; k < SKETCH; k++) {
        out->sketch[k] = p->batch ? 0.0 : out->rows[k];
        for (int64_t i = 0; p->batch && i < p->samples; i++)
            out->sketch[k] += out->rows[i * SKETCH + k] * p->batch[i * SKETCH + k];
    }
    for (int64_t i = 0; p->batch && i < p->samples * SKETCH; i++)
        out->rows32[i] = (float)out->rows[i];
    return READ;
}

/* Measures a value without its hashes; REFUSED as `rankscope_read`. */
int rankscope_look(const struct plan *p, const void *values, struct result *out) {
    return measure(p, values, 0, NULL, out);
}

/* What was measured in this step, by address; any number of threads. */
struct remembered {
    uint64_t address; /* 0: a free place */
    const struct plan *plan;
    struct result *result; /* without `rows`, with the rows of `rows32` that the plan has */
};
struct memory {
    struct remembered *places;
    size_t size, count; /* a power of two; places taken */
    char is_taken;
};
#define MOST_REMEMBERED (1 << 16)
#define NUMBERS_BYTES offsetof(struct result, rows)
#define ROWS_BYTES(p) ((p)->batch ? (size_t)(p)->samples * SKETCH * sizeof(float) : 0)

INLINE void take_lock(struct memory *m) {
    while (__atomic_test_and_set(&m->is_taken, __ATOMIC_ACQUIRE)) {}
}

INLINE void give_lock(struct memory *m) { __atomic_clear(&m->is_taken, __ATOMIC_RELEASE); }

static struct remembered *place_of(struct memory *m, uint64_t address) {
    size_t at = (size_t)((address >> 4) * PRIME64_1 >> 20);
    for (;; at++) {
        struct remembered *place = m->places + (at & (m->size - 1));
        if (!place->address || place->address == address) return place;
    }
}

static void copy_result(const struct plan *p, const struct result *from, struct result *to,
                        int is_stored, int will_be_stored) {
    const char *rows = (const char *)from + (is_stored ? NUMBERS_BYTES : offsetof(struct result, rows32));
    memcpy(to, from, NUMBERS_BYTES);
    memcpy((char *)to + (will_be_stored ? NUMBERS_BYTES : offsetof(struct result, rows32)), rows,
           ROWS_BYTES(p));
}

void rankscope_forget(struct memory *m) {
    take_lock(m);
    for (size_t i = 0; i < m->size && m->count; i++)
        if (m->places[i].address) {
            free(m->places[i].result);
            m->places[i] = (struct remembered){0};
            m->count--;
        }
    give_lock(m);
}

struct memory *rankscope_new_memory(void) {
    struct memory *m = calloc(1, sizeof *m);
    if (m) m->size = 1024, m->places = calloc(m->size, sizeof *m->places);
    if (m && m->places) return m;
    free(m);
    return NULL;
}

void rankscope_free_memory(struct memory *m) {
    if (!m) return;
    rankscope_forget(m);
    free(m->places);
    free(m);
}

/* Doubles the places; where there is no memory for more, what is there fills further. */
static void grow(struct memory *m) {
    struct memory larger = {.size = 2 * m->size};
    larger.places = calloc(larger.size, sizeof *m->places);
    if (!larger.places) return;
    for (size_t i = 0; i < m->size; i++)
        if (m->places[i].address) *place_of(&larger, m->places[i].address) = m->places[i];
    free(m->places);
    m->places = larger.places, m->size = larger.size;
}

static void remember(struct memory *m, const struct plan *p, uint64_t address,
                     const struct result *result) {
    struct result *copy = malloc(NUMBERS_BYTES + ROWS_BYTES(p));
    if (!copy) return;
    copy_result(p, result, copy, 0, 1);
    if (m->count >= MOST_REMEMBERED) rankscope_forget(m);
    take_lock(m);
    if (2 * m->count >= m->size) grow(m);
    if (m->count + 1 >= m->size) { /* a free place has to end every search */
        give_lock(m);
        free(copy);
        return;
    }
    struct remembered *place = place_of(m, address);
    m->count += !place->address;
    free(place->result);
    *place = (struct remembered){address, p, copy};
    give_lock(m);
}

/* Measures a value of contiguous words; `address` is that of its tensor. Returns KNOWN where the same
   bytes were measured there before: every number in `out` is that of then. REFUSED: `out` holds `raw`
   alone. The address is a hint, the hash decides. */
int rankscope_read(struct memory *m, const struct plan *p, uint64_t address, const void *values,
                   struct result *out) {
    uint64_t expected = 0;
    int is_hint = 0, outcome;
    take_lock(m);
    struct remembered *place = place_of(m, address);
    if (place->plan == p) is_hint = 1, expected = place->result->raw;
    give_lock(m);
    outcome = measure(p, values, 1, is_hint ? &expected : NULL, out);
    if (outcome == KNOWN) {
        take_lock(m);
        place = place_of(m, address); /* another thread may have measured there meanwhile */
        int is_same = place->plan == p && place->result->raw == expected;
        if (is_same) copy_result(p, place->result, out, 1, 0);
        give_lock(m);
        if (is_same) return KNOWN;
        outcome = measure(p, values, 1, NULL, out);
    }
    if (outcome == READ) remember(m, p, address, out);
    return outcome;
}

/* Returns the sum of the squares of x - center, every difference and sum in double. */
double rankscope_squares_around(const float *x, int64_t count, double center) {
    quad_double sums[4] = {{0}}, middle = {center, center, center, center};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int k = 0; k < 4; k++) {
            quad part;
            memcpy(&part, x + i + 4 * k, sizeof part);
            quad_double away = __builtin_convertvector(part, quad_double) - middle;
            sums[k] += away * away;
        }
    quad_double all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = (all[0] + all[1]) + (all[2] + all[3]);
    for (; i < count; i++) total += (x[i] - center) * (x[i] - center);
    return total;
}
