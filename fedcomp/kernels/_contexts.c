/* Levels in contexts: encoder and decoder of fedcomp/kernels/portable_contexts.py, which says what they mean.
 *
 * One text for both: `mode` is a constant in each call, so that the compiler decides what a decision does. No product is
 * contracted (setup.py), and shifts of negative numbers are those of every compiler there is, by two's complement; the
 * module refuses to load where they are not. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _MSC_VER
#include <intrin.h>
#define ALWAYS static __forceinline
#else
#define ALWAYS static inline __attribute__((always_inline))
#endif

enum { WRITE, READ };
enum { CLASSES = 20, SIZES = 18, CONTEXTS = CLASSES * CLASSES * SIZES, HIGH = 65512, LOW = 24, HALF = 32768 };
enum { TOP_BITS = 28768, FLAGGED = 8, SHIFT = 8, LEAST_ROW = 4, LEAST_COLUMN = 2 };
enum { ROW_WINDOW = 32, COLUMN_WINDOW = 16, EARLY = 4 };

typedef struct {
    uint64_t low, span;
    int64_t at, room;
    uint32_t *words;
} Coder;

typedef struct {
    uint16_t ones[CONTEXTS], below[3 * SIZES], flags[2];
    uint8_t counts[CONTEXTS], used[3 * SIZES], seen[2];
} Model;

ALWAYS int decide(int mode, Coder *c, uint64_t one, int known) {
    uint64_t bound = (c->span >> 16) * one;
    if (mode == READ) {
        known = c->low < bound;
        if (!known) c->low -= bound;
    } else if (!known) {
        uint64_t raised = c->low + bound;
        if (raised < c->low) {
            int64_t carried = c->at - 1;
            while (c->words[carried] == 0xFFFFFFFFu) c->words[carried--] = 0;
            c->words[carried] += 1;
        }
        c->low = raised;
    }
    c->span = known ? bound : c->span - bound;
    if (c->span < (uint64_t)1 << 32) {
        if (mode == READ) {
            c->low = c->low << 32 | (c->at < c->room ? c->words[c->at] : 0);
        } else {
            c->words[c->at] = (uint32_t)(c->low >> 32);
            c->low <<= 32;
        }
        c->span <<= 32;
        c->at += 1;
    }
    return known;
}

/* Of how often a probability was used, how far it moves, over 65536; and 65536 over the length of a mean. */
static int64_t rates[256], windows[ROW_WINDOW + 1];

ALWAYS int adapt(int mode, Coder *c, uint16_t *ones, uint8_t *counts, int64_t place, int known) {
    int64_t one = ones[place];
    int bit = decide(mode, c, (uint64_t)one, known);
    ones[place] = (uint16_t)(one + ((((bit ? HIGH : LOW) - one) * rates[counts[place]]) >> 16));
    counts[place] += counts[place] < 255;
    return bit;
}

/* The bits of a number that is not negative. */
ALWAYS int length(int32_t number) {
#ifdef _MSC_VER
    unsigned long last;
    return _BitScanReverse(&last, (unsigned long)number) ? (int)last + 1 : 0;
#else
    return number ? 32 - __builtin_clz((unsigned)number) : 0;
#endif
}

ALWAYS int64_t between(int64_t number, int64_t least, int64_t most) {
    return number < least ? least : number > most ? most : number;
}

/* Return the decisions; -1: more than `most`, -2: a row of zeros without a flag, -3: the words are full, -4: memory. */
ALWAYS int64_t code(int mode, Coder *coder, const uint16_t *first, int32_t *levels, const int64_t *shapes,
                    int64_t count, int top, int64_t most) {
    /* A copy, whose address nobody has: it stays in registers. */
    Coder own = *coder, *c = &own;
    int64_t widest = 1, mean = 64, at = 0, decisions = 0, status = 0;
    for (int64_t i = 0; i < count; i++) widest = shapes[2 * i + 1] > widest ? shapes[2 * i + 1] : widest;
    Model *m = malloc(sizeof(Model));
    int32_t *means = malloc((size_t)widest * sizeof(int32_t));
    if (!m || !means) { status = -4; goto done; }
    memset(m, 0, sizeof(Model));
    memcpy(m->ones, first, sizeof(m->ones));
    for (int i = 0; i < 3 * SIZES; i++) m->below[i] = TOP_BITS;
    m->flags[0] = m->flags[1] = HALF;
    int flag = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t rows = shapes[2 * i], columns = shapes[2 * i + 1];
        for (int64_t j = 0; j < columns; j++) means[j] = (int32_t)mean;
        for (int64_t row = 0; row < rows; row++) {
            int64_t window = windows[row + 2 < COLUMN_WINDOW ? row + 2 : COLUMN_WINDOW];
            int empty = columns >= FLAGGED;
            if (empty) {
                int known = 1;
                if (mode != READ)
                    for (int64_t j = at; j < at + columns; j++)
                        if (levels[j]) { known = 0; break; }
                flag = adapt(mode, c, m->flags, m->seen, flag, known);
                if (++decisions > most) { status = -1; goto done; }
                if (mode == WRITE && c->at + 16 > c->room) { status = -3; goto done; }
                if (flag) {
                    if (mode == READ) memset(levels + at, 0, (size_t)columns * sizeof(int32_t));
                    for (int64_t j = 0; j < columns; j++) means[j] -= (int32_t)(means[j] * window >> 16);
                    mean = between(mean - (mean >> 4), 1, INT64_MAX);
                    at += columns;
                    continue;
                }
            }
            int64_t along = mean;
            for (int64_t column = 0; column < columns; column++, at++) {
                int64_t over = means[column];
                int64_t context = SIZES * (CLASSES * between(length((int32_t)along), LEAST_ROW, CLASSES - 1) +
                                           between(length((int32_t)over), LEAST_COLUMN, CLASSES - 1));
                int32_t known = mode == READ ? 0 : levels[at];
                uint32_t magnitude = (uint32_t)(known < 0 ? -known : known), found = 0;
                int bits = mode == READ ? 0 : length((int32_t)magnitude), size = 0;
                while (size < top && adapt(mode, c, m->ones, m->counts, context + size, bits > size)) size++;
                decisions += (size + 1 < top ? size + 1 : top) + size;
                if (size) {
                    found = 1;
                    for (int shift = size - 2; shift >= 0; shift--) {
                        int bit = magnitude >> shift & 1;
                        bit = found < 4 ? adapt(mode, c, m->below, m->used, 3 * size + (int)found - 1, bit)
                                        : decide(mode, c, HALF, bit);
                        found = 2 * found + (uint32_t)bit;
                    }
                    int negative = decide(mode, c, HALF, known < 0);
                    if (mode == READ) levels[at] = negative ? -(int32_t)found : (int32_t)found;
                    empty = 0;
                } else if (mode == READ) {
                    levels[at] = 0;
                }
                int64_t scaled = (int64_t)found << SHIFT;
                int64_t early = column + EARLY < ROW_WINDOW ? column + EARLY : ROW_WINDOW;
                along = between(along + (((scaled - along) * windows[early]) >> 16), 0, INT64_MAX);
                means[column] = (int32_t)between(over + (((scaled - over) * window) >> 16), 0, INT64_MAX);
                if (decisions > most) { status = -1; goto done; }
                if (mode == WRITE && c->at + 16 > c->room) { status = -3; goto done; }
            }
            if (empty) { status = -2; goto done; }
            mean = between(mean + ((along - mean) >> 2), 1, INT64_MAX);
        }
    }
done:
    *coder = own;
    free(m);
    free(means);
    return status ? status : decisions;
}

/* code(writes, levels, shapes, top, most, words, state, first): int32 levels, which are read into unless they are written
 * to `words`, int64 shapes, uint32 words, uint64 state, uint16 probabilities at the start. */
static PyObject *py_code(PyObject *self, PyObject *args) {
    int writes, top;
    long long most;
    Py_buffer levels, shapes, words, state, first;
    (void)self;
    if (!PyArg_ParseTuple(args, "py*y*iLw*w*y*", &writes, &levels, &shapes, &top, &most, &words, &state, &first))
        return NULL;
    const int64_t *of = shapes.buf;
    int64_t count = shapes.len / 16, room = 0, status = -5;
    for (int64_t i = 0; i < count; i++) room += of[2 * i] * of[2 * i + 1];
    if (room * 4 == levels.len && (writes || !levels.readonly) && state.len == 24 && first.len == 2 * CONTEXTS && top >= 0 &&
        top < SIZES) {
        uint64_t *held = state.buf;
        Coder c = {held[0], held[1], (int64_t)held[2], words.len / 4, words.buf};
        Py_BEGIN_ALLOW_THREADS
        status = writes ? code(WRITE, &c, first.buf, levels.buf, of, count, top, most)
                        : code(READ, &c, first.buf, levels.buf, of, count, top, most);
        Py_END_ALLOW_THREADS
        held[0] = c.low, held[1] = c.span, held[2] = (uint64_t)c.at;
    }
    PyBuffer_Release(&levels), PyBuffer_Release(&shapes), PyBuffer_Release(&words);
    PyBuffer_Release(&state), PyBuffer_Release(&first);
    if (status == -4) return PyErr_NoMemory();
    if (status == -5) return PyErr_Format(PyExc_ValueError, "arrays of other lengths or levels of other bits");
    return PyLong_FromLongLong(status);
}

static void quantise(const float *values, int64_t count, float inverse, int32_t *out) {
    for (int64_t i = 0; i < count; i++) {
        float size = (values[i] < 0.0f ? -values[i] : values[i]) * inverse;
        /* Without a branch; what is rounded to 1 is 0 below 0.6, which leaves all from 1 on as it is. */
        int32_t level = (int32_t)(size + 0.5f), negative = -(values[i] < 0.0f);
        level -= (level == 1) & (size < 0.6f);
        out[i] = (level ^ negative) - negative;
    }
}

static void dither(const float *values, int64_t count, double inverse, const uint32_t *draws, int32_t *out) {
    for (int64_t i = 0; i < count; i++) {
        double scaled = (double)values[i] * inverse;
        double up = scaled + (2.0 * draws[i] + 1.0) * (1.0 / (1 << 25));
        int32_t whole = (int32_t)up;
        out[i] = whole - (up < whole);
    }
}

static void magnitudes(const uint32_t *values, int64_t count, int64_t *counts) {
    for (int64_t i = 0; i < count; i++) counts[values[i] >> 16 & 0x7FFF]++;
}

/* quantise(values, inverse, draws, out): with draws as many as values dithered, with none rounded. */
static PyObject *py_quantise(PyObject *self, PyObject *args) {
    double inverse;
    Py_buffer values, draws, out;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*dy*w*", &values, &inverse, &draws, &out)) return NULL;
    int fits = out.len == values.len && (!draws.len || draws.len == values.len);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        if (draws.len) dither(values.buf, values.len / 4, inverse, draws.buf, out.buf);
        else quantise(values.buf, values.len / 4, (float)inverse, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values), PyBuffer_Release(&draws), PyBuffer_Release(&out);
    if (!fits) return PyErr_Format(PyExc_ValueError, "arrays of other lengths");
    Py_RETURN_NONE;
}

/* magnitudes(values, counts): adds to int64 counts of 2**15 patterns. */
static PyObject *py_magnitudes(PyObject *self, PyObject *args) {
    Py_buffer values, counts;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*w*", &values, &counts)) return NULL;
    int fits = counts.len == 8 << 15;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        magnitudes(values.buf, values.len / 4, counts.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&values), PyBuffer_Release(&counts);
    if (!fits) return PyErr_Format(PyExc_ValueError, "arrays of other lengths");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"code", py_code, METH_VARARGS, "Write or read levels."},
                                {"quantise", py_quantise, METH_VARARGS, "Round to levels."},
                                {"magnitudes", py_magnitudes, METH_VARARGS, "Count by exponent and mantissa."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_contexts", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__contexts(void) {
    if ((-5 >> 1) != -3) {
        PyErr_SetString(PyExc_ImportError, "shifts of negative numbers are not arithmetic");
        return NULL;
    }
    for (int i = 0; i < 256; i++) rates[i] = 655360 / (10 * i + 16);
    for (int i = 1; i <= ROW_WINDOW; i++) windows[i] = 65536 / i;
    return PyModule_Create(&module);
}
