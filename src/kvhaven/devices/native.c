/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies of heads between an engine's pages and host memory, where K may lie in columns on one side
 * and in rows on the other. native.py calls it and documents its input; hatch_build.py builds it.
 *
 * Most of the time goes into cache misses. So all planes of a head are copied together, since they
 * share pages of memory; and while one matrix is transposed, the next is prefetched.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* One side of a copy: `[block or position, head, layer, plane, token, item]`, strides in bytes. */
struct side {
  char *data;
  int64_t strides[6];
};

/* Two sides with equal numbers of heads, layers, planes, tokens and items of `item` bytes. */
struct pair {
  struct side source, target;
  int64_t planes, tokens, items, item;
};

/* A matrix: item (r, c) lies at `source` + r * source_row + c * item, and goes to
 * `target` + c * target_row + r * item. */
struct matrix {
  const char *source;
  char *target;
  ptrdiff_t source_row, target_row;
  size_t rows, columns;
};

static void turn_items(const struct matrix *m, size_t item, size_t row, size_t end_row,
                       size_t column, size_t end_column) {
  for (size_t c = column; c < end_column; c++)
    for (size_t r = row; r < end_row; r++)
      memcpy(m->target + (ptrdiff_t)c * m->target_row + r * item,
             m->source + (ptrdiff_t)r * m->source_row + c * item, item);
}

#ifdef __SSE2__
static inline __m128i row_of(const char *source, ptrdiff_t stride, int row) {
  return _mm_loadu_si128((const __m128i *)(source + row * stride));
}

static inline void put_row(char *target, ptrdiff_t stride, int row, __m128i items) {
  _mm_storeu_si128((__m128i *)(target + row * stride), items);
}

/* 8 x 8 items of 2 bytes: pairs of rows are interleaved, then pairs of pairs, then halves. */
static inline void turn_tile_2(const char *source, ptrdiff_t from, char *target, ptrdiff_t to) {
  __m128i two[8], four[8];
  for (int i = 0; i < 4; i++) {
    __m128i even = row_of(source, from, 2 * i), odd = row_of(source, from, 2 * i + 1);
    two[2 * i] = _mm_unpacklo_epi16(even, odd);
    two[2 * i + 1] = _mm_unpackhi_epi16(even, odd);
  }
  for (int half = 0; half < 2; half++) { /* columns 0 to 3, columns 4 to 7 */
    for (int i = 0; i < 2; i++) {        /* rows 0 to 3, rows 4 to 7 */
      __m128i low = two[4 * i + half], high = two[4 * i + 2 + half];
      four[4 * i + 2 * half] = _mm_unpacklo_epi32(low, high);
      four[4 * i + 2 * half + 1] = _mm_unpackhi_epi32(low, high);
    }
  }
  for (int i = 0; i < 4; i++) {
    put_row(target, to, 2 * i, _mm_unpacklo_epi64(four[i], four[i + 4]));
    put_row(target, to, 2 * i + 1, _mm_unpackhi_epi64(four[i], four[i + 4]));
  }
}

/* 4 x 4 items of 4 bytes. */
static inline void turn_tile_4(const char *source, ptrdiff_t from, char *target, ptrdiff_t to) {
  __m128i a = row_of(source, from, 0), b = row_of(source, from, 1);
  __m128i c = row_of(source, from, 2), d = row_of(source, from, 3);
  __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  put_row(target, to, 0, _mm_unpacklo_epi64(ab, cd));
  put_row(target, to, 1, _mm_unpackhi_epi64(ab, cd));
  ab = _mm_unpackhi_epi32(a, b), cd = _mm_unpackhi_epi32(c, d);
  put_row(target, to, 2, _mm_unpacklo_epi64(ab, cd));
  put_row(target, to, 3, _mm_unpackhi_epi64(ab, cd));
}
#endif

static inline void turn_tile(const struct matrix *m, size_t item, size_t row, size_t column) {
#ifdef __SSE2__
  const char *source = m->source + (ptrdiff_t)row * m->source_row + column * item;
  char *target = m->target + (ptrdiff_t)column * m->target_row + row * item;
  if (item == 2)
    turn_tile_2(source, m->source_row, target, m->target_row);
  else
    turn_tile_4(source, m->source_row, target, m->target_row);
#else
  turn_items(m, item, row, row + 16 / item, column, column + 16 / item);
#endif
}

static inline void fetch(const char *next_source, const char *next_target, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(next_source + at, 0, 2);
    __builtin_prefetch(next_target + at, 1, 2);
  }
}

/* Columns are the outer loop, so that the target is written from its start to its end. */
static inline void turn(const struct matrix *m, size_t item, const char *next_source,
                        const char *next_target) {
  size_t tile = 16 / item, bytes = tile * 16, at = 0;
  size_t rows = m->rows - m->rows % tile, columns = m->columns - m->columns % tile;
  for (size_t c = 0; c < columns; c += tile)
    for (size_t r = 0; r < rows; r += tile, at += bytes) {
      fetch(next_source + at, next_target + at, bytes);
      turn_tile(m, item, r, c);
    }
  turn_items(m, item, rows, m->rows, 0, m->columns);
  turn_items(m, item, 0, rows, columns, m->columns);
}

/* Copies all planes of a head whose rows are dense on both sides. Planes are the inner loop: where
 * they alternate, the source or the target is traversed once, not once per plane. */
static inline void copy_rows(const struct pair *pair, const char *source, char *target,
                             const char *next_source, const char *next_target) {
  const int64_t *from = pair->source.strides, *to = pair->target.strides;
  int64_t row = pair->items * pair->item, tokens = pair->tokens;
  if (from[4] == row && to[4] == row) { /* the tokens of a plane are one row */
    row *= tokens;
    tokens = 1;
  }
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t plane = 0; plane < pair->planes; plane++) {
      int64_t source_at = token * from[4] + plane * from[3], target_at = token * to[4] + plane * to[3];
      if (tokens > 1)
        fetch(next_source + source_at, next_target + target_at, (size_t)row);
      memcpy(target + target_at, source + source_at, (size_t)row);
    }
}

static void copy_head(const struct pair *pair, const char *source, char *target,
                      const char *next_source, const char *next_target) {
  const int64_t *from = pair->source.strides, *to = pair->target.strides;
  if (from[5] == pair->item && to[5] == pair->item) {
    copy_rows(pair, source, target, next_source, next_target);
    return;
  }
  for (int64_t plane = 0; plane < pair->planes; plane++) {
    struct matrix m = {.source = source + plane * from[3], .target = target + plane * to[3]};
    int columns = to[5] == pair->item; /* of tokens in the source; else in the target */
    m.rows = (size_t)(columns ? pair->items : pair->tokens);
    m.columns = (size_t)(columns ? pair->tokens : pair->items);
    m.source_row = columns ? from[5] : from[4];
    m.target_row = columns ? to[4] : to[5];
    if (pair->item == 2)
      turn(&m, 2, next_source + plane * from[3], next_target + plane * to[3]);
    else
      turn(&m, 4, next_source + plane * from[3], next_target + plane * to[3]);
  }
}

/* Returns the address of a copy's n-th head, in the order of layers, then blocks, then heads. */
static char *at(const struct side *side, const int64_t *blocks, int64_t count, int64_t heads,
                int64_t n) {
  const int64_t *strides = side->strides;
  return side->data + blocks[n / heads % count] * strides[0] + n % heads * strides[1] +
         n / heads / count * strides[2];
}

/* Copies all pairs of some blocks: index `from[i]` of the source to `to[i]` of the target.
 * The number in the name increases when the arguments change. */
void kvhaven_copy_heads_1(const struct pair *pairs, int64_t count, const int64_t *from,
                          const int64_t *to, int64_t blocks, int64_t heads, int64_t layers) {
  int64_t total = layers * blocks * heads;
  for (int64_t n = 0; n < total; n++) {
    int64_t next = n + 1 < total ? n + 1 : n;
    for (const struct pair *pair = pairs; pair < pairs + count; pair++)
      copy_head(pair, at(&pair->source, from, blocks, heads, n),
                at(&pair->target, to, blocks, heads, n),
                at(&pair->source, from, blocks, heads, next),
                at(&pair->target, to, blocks, heads, next));
  }
}
