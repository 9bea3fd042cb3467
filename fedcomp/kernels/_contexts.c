/* Levels in contexts: cost, encoder and decoder of fedcomp/kernels/portable_contexts.py, which says what they mean.
 *
 * One text for the three: `mode` is a constant in each caller, so that the compiler decides what a decision does. All
 * tables come from Python. No product is contracted (setup.py), and shifts of negative numbers are those of every
 * compiler there is, by two's complement; the module refuses to load where they are not. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _MSC_VER
#define ALWAYS static __forceinline
#else
#define ALWAYS static inline __attribute__((always_inline))
#endif

enum { COST, WRITE, READ };
enum { CLASSES = 20, SIZES = 18, CONTEXTS = CLASSES * CLASSES * SIZES, HIGH = 65512, LOW = 24, HALF = 32768 };
enum { TOP_BITS = 28768, FLAGGED = 8, SHIFT = 8, LEAST_ROW = 4, LEAST_COLUMN = 2 };
enum { ROW_WINDOW = 32, COLUMN_WINDOW = 16, EARLY = 4 };

typedef struct {
    const uint16_t *first;
    const int64_t *rates, *windows;
    const uint64_t *costs;
} Tables;

typedef struct {
    uint64_t low, span;
    int64_t at, room;
    uint32_t *words;
} Coder;

typedef struct {
    uint16_t ones[CONTEXTS], below[3 * SIZES], flags[2];
    uint8_t counts[CONTEXTS], used[3 * SIZES], seen[2];
} Model;

ALWAYS int decide(int mode, Coder *c, const Tables *t, uint64_t one, int known) {
    if (mode == COST) {
        c->low += t->costs[(known ? one : 65536 - one) >> 4];
        return known;
    }
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

ALWAYS int adapt(int mode, Coder *c, const Tables *t, uint16_t *ones, uint8_t *counts, int64_t place, int known) {
    int64_t one = ones[place];
    int bit = decide(mode, c, t, (uint64_t)one, known);
    ones[place] = (uint16_t)(one + ((((bit ? HIGH : LOW) - one) * t->rates[counts[place]]) >> 16));
    counts[place] += counts[place] < 255;
    return bit;
}

ALWAYS int length(uint32_t number) {
    int found = 0;
    if (number >> 16) { number >>= 16; found = 16; }
    if (number >> 8) { number >>= 8; found += 8; }
    if (number >> 4) { number >>= 4; found += 4; }
    if (number >> 2) { number >>= 2; found += 2; }
    if (number >> 1) { number >>= 1; found += 1; }
    return found + (int)number;
}

ALWAYS int64_t between(int64_t number, int64_t least, int64_t most) {
    return number < least ? least : number > most ? most : number;
}

/* Return the decisions; -1: more than `most`, -2: a row of zeros without a flag, -3: the words are full, -4: memory. */
ALWAYS int64_t code(int mode, Coder *c, const Tables *t, int32_t *levels, const int64_t *shapes, int64_t count, int top,
                    int64_t most) {
    int64_t widest = 1, mean = 64, at = 0, decisions = 0, status = 0;
    for (int64_t i = 0; i < count; i++) widest = shapes[2 * i + 1] > widest ? shapes[2 * i + 1] : widest;
    Model *m = malloc(sizeof(Model));
    int32_t *means = malloc((size_t)widest * sizeof(int32_t));
    if (!m || !means) { status = -4; goto done; }
    memset(m, 0, sizeof(Model));
    memcpy(m->ones, t->first, sizeof(m->ones));
    for (int i = 0; i < 3 * SIZES; i++) m->below[i] = TOP_BITS;
    m->flags[0] = m->flags[1] = HALF;
    int flag = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t rows = shapes[2 * i], columns = shapes[2 * i + 1];
        for (int64_t j = 0; j < columns; j++) means[j] = (int32_t)mean;
        for (int64_t row = 0; row < rows; row++) {
            int64_t window = t->windows[row + 2 < COLUMN_WINDOW ? row + 2 : COLUMN_WINDOW];
            int empty = columns >= FLAGGED;
            if (empty) {
                int known = 1;
                if (mode != READ)
                    for (int64_t j = at; j < at + columns; j++)
                        if (levels[j]) { known = 0; break; }
                flag = adapt(mode, c, t, m->flags, m->seen, flag, known);
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
                int64_t context = SIZES * (CLASSES * between(length((uint32_t)along), LEAST_ROW, CLASSES - 1) +
                                           between(length((uint32_t)over), LEAST_COLUMN, CLASSES - 1));
                int32_t known = mode == READ ? 0 : levels[at];
                uint32_t magnitude = (uint32_t)(known < 0 ? -known : known), found = 0;
                int bits = mode == READ ? 0 : length(magnitude), size = 0;
                while (size < top && adapt(mode, c, t, m->ones, m->counts, context + size, bits > size)) size++;
                decisions += (size + 1 < top ? size + 1 : top) + size;
                if (size) {
                    found = 1;
                    for (int shift = size - 2; shift >= 0; shift--) {
                        int bit = magnitude >> shift & 1;
                        bit = found < 4 ? adapt(mode, c, t, m->below, m->used, 3 * size + (int)found - 1, bit)
                                        : decide(mode, c, t, HALF, bit);
                        found = 2 * found + (uint32_t)bit;
                    }
                    int negative = decide(mode, c, t, HALF, known < 0);
                    if (mode == READ) levels[at] = negative ? -(int32_t)found : (int32_t)found;
                    empty = 0;
                } else if (mode == READ) {
                    levels[at] = 0;
                }
                int64_t scaled = (int64_t)found << SHIFT;
                int64_t early = column + EARLY < ROW_WINDOW ? column + EARLY : ROW_WINDOW;
                along = between(along + (((scaled - along) * t->windows[early]) >> 16), 0, INT64_MAX);
                means[column] = (int32_t)between(over + (((scaled - over) * window) >> 16), 0, INT64_MAX);
                if (decisions > most) { status = -1; goto done; }
                if (mode == WRITE && c->at + 16 > c->room) { status = -3; goto done; }
            }
            if (empty) { status = -2; goto done; }
            mean = between(mean + ((along - mean) >> 2), 1, INT64_MAX);
        }
    }
done:
    free(m);
    free(means);
    return status ? status : decisions;
}

static int64_t cost(Coder *c, const Tables *t, int32_t *l, const int64_t *s, int64_t n, int top, int64_t most) {
    return code(COST, c, t, l, s, n, top, most);
}
static int64_t encode(Coder *c, const Tables *t, int32_t *l, const int64_t *s, int64_t n, int top, int64_t most) {
    return code(WRITE, c, t, l, s, n, top, most);
}
static int64_t decode(Coder *c, const Tables *t, int32_t *l, const int64_t *s, int64_t n, int top, int64_t most) {
    return code(READ, c, t, l, s, n, top, most);
}

/* code(mode, levels, shapes, top, most, words, state, first, rates, windows, costs): arrays of the types above. */
static PyObject *call(PyObject *self, PyObject *args) {
    int mode, top;
    long long most;
    PyObject *given[8];
    Py_buffer views[8];
    (void)self;
    if (!PyArg_ParseTuple(args, "iOOiLOOOOOO", &mode, &given[0], &given[1], &top, &most, &given[2], &given[3],
                          &given[4], &given[5], &given[6], &given[7]))
        return NULL;
    for (int i = 0; i < 8; i++) {
        int flags = i == 0 && mode == READ ? PyBUF_WRITABLE : i == 3 || (i == 2 && mode == WRITE) ? PyBUF_WRITABLE : 0;
        if (PyObject_GetBuffer(given[i], &views[i], PyBUF_SIMPLE | flags) < 0) {
            while (i--) PyBuffer_Release(&views[i]);
            return NULL;
        }
    }
    const int64_t *shapes = views[1].buf;
    int64_t count = views[1].len / 16, room = 0, status = -5;
    for (int64_t i = 0; i < count; i++) room += shapes[2 * i] * shapes[2 * i + 1];
    if (room * 4 == views[0].len && views[3].len == 24 && views[4].len == 2 * CONTEXTS && views[5].len == 256 * 8 &&
        views[6].len >= 33 * 8 && views[7].len == 4097 * 8 && top >= 0 && top < SIZES) {
        uint64_t *state = views[3].buf;
        Tables t = {views[4].buf, views[5].buf, views[6].buf, views[7].buf};
        Coder c = {state[0], state[1], (int64_t)state[2], views[2].len / 4, views[2].buf};
        Py_BEGIN_ALLOW_THREADS
        status = (mode == COST ? cost : mode == WRITE ? encode : decode)(&c, &t, views[0].buf, shapes, count, top, most);
        Py_END_ALLOW_THREADS
        state[0] = c.low, state[1] = c.span, state[2] = (uint64_t)c.at;
    }
    for (int i = 0; i < 8; i++) PyBuffer_Release(&views[i]);
    if (status == -4) return PyErr_NoMemory();
    if (status == -5) return PyErr_Format(PyExc_ValueError, "arrays of other lengths or levels of other bits");
    return PyLong_FromLongLong(status);
}

static void quantise(const float *values, int64_t count, float inverse, int32_t *out) {
    for (int64_t i = 0; i < count; i++) {
        float size = (values[i] < 0.0f ? -values[i] : values[i]) * inverse;
        int32_t level = size < 1.0f ? size >= 0.6f : (int32_t)(size + 0.5f);
        out[i] = values[i] < 0.0f ? -level : level;
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

/* quantise(values, inverse, draws, out): with draws as many as values dithered, with none rounded. */
static PyObject *levels(PyObject *self, PyObject *args) {
    double inverse;
    PyObject *given[3];
    Py_buffer views[3];
    (void)self;
    if (!PyArg_ParseTuple(args, "OdOO", &given[0], &inverse, &given[1], &given[2])) return NULL;
    for (int i = 0; i < 3; i++)
        if (PyObject_GetBuffer(given[i], &views[i], PyBUF_SIMPLE | (i == 2 ? PyBUF_WRITABLE : 0)) < 0) {
            while (i--) PyBuffer_Release(&views[i]);
            return NULL;
        }
    int fits = views[2].len == views[0].len && (views[1].len == 0 || views[1].len == views[0].len);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        if (views[1].len) dither(views[0].buf, views[0].len / 4, inverse, views[1].buf, views[2].buf);
        else quantise(views[0].buf, views[0].len / 4, (float)inverse, views[2].buf);
        Py_END_ALLOW_THREADS
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&views[i]);
    if (!fits) return PyErr_Format(PyExc_ValueError, "arrays of other lengths");
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"code", call, METH_VARARGS, "Cost, write or read levels."},
                                {"quantise", levels, METH_VARARGS, "Round to levels."},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_contexts", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__contexts(void) {
    if ((-5 >> 1) != -3) {
        PyErr_SetString(PyExc_ImportError, "shifts of negative numbers are not arithmetic");
        return NULL;
    }
    return PyModule_Create(&module);
}
