/* Hooks of module calls without Python between torch and the spool: the arguments of a call are
   walked, plain tensors on the host are described and measured (kernel.c), records are committed.

   Whatever is out of the ordinary (subclasses, odd containers, an unknown module, a step that is
   not traced) is left to Python: whole calls before anything was changed, single values one by one.
   Both ways write the same cells.

   Functions of Python's stable ABI (3.10) are declared here by hand: Python.h need not be there,
   and one library serves every Python. Nothing of torch's C++ is used: tensors are asked as Python
   asks them. An object may be NULL everywhere: then an exception is set, and whoever began the work
   looks for one. */

#include <time.h>

typedef struct _object PyObject;
typedef ptrdiff_t Size;
typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef struct { const char *name; PyCFunction function; int flags; const char *doc; } PyMethodDef;
enum { METH_NOARGS = 4, METH_FASTCALL = 0x80 };

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
void Py_IncRef(PyObject *), Py_DecRef(PyObject *);
void PyEval_RestoreThread(void *), *PyEval_SaveThread(void);
PyObject *PyObject_Type(PyObject *), *PyObject_GetAttr(PyObject *, PyObject *);
int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
PyObject *PyObject_CallObject(PyObject *, PyObject *);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
PyObject *PyUnicode_InternFromString(const char *), *PyUnicode_FromFormat(const char *, ...);
Size PyUnicode_GetLength(PyObject *);
PyObject *PyLong_FromLongLong(long long), *PyLong_FromVoidPtr(void *);
long long PyLong_AsLongLong(PyObject *);
void *PyLong_AsVoidPtr(PyObject *);
PyObject *PyBytes_FromStringAndSize(const char *, Size);
PyObject *PyTuple_New(Size), *PyTuple_GetItem(PyObject *, Size), *PyTuple_Pack(Size, ...);
PyObject *PyList_New(Size), *PyList_GetItem(PyObject *, Size), *PyIter_Next(PyObject *);
Size PyTuple_Size(PyObject *), PyList_Size(PyObject *), PyDict_Size(PyObject *);
int PyList_Append(PyObject *, PyObject *), PyList_SetSlice(PyObject *, Size, Size, PyObject *);
PyObject *PyDict_New(void), *PyDict_GetItemWithError(PyObject *, PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
int PyDict_Next(PyObject *, Size *, PyObject **, PyObject **);
PyObject *PyErr_Occurred(void), *PyErr_NoMemory(void);
void PyErr_Clear(void), PyErr_Fetch(PyObject **, PyObject **, PyObject **);
void PyErr_Restore(PyObject *, PyObject *, PyObject *);
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
unsigned long PyThread_get_thread_ident(void);

#define NONE (&_Py_NoneStruct)
#define TRUE (&_Py_TrueStruct)
#define FALSE (&_Py_FalseStruct)
#define CAPSULE "rankscope.native"
#define MOST_DIMS 8
#define MOST_DEPTH 8
#define LONG_SEQUENCE 16
#define LONG_NAME 100
#define MOST_FORMS 4096
#define MOST_WITH_LOCK (1 << 19) /* elements, a quarter of a millisecond */

/* Mirrored by rankscope.spool.recordformat and rankscope.record.value; a test compares cells. */
enum { ENTER = 2, EXIT = 3, VALUE = 4, SAMPLES = 5 };
enum { STRUCTURE = 16, REUSED = 64, PYTHON = 128, HAS_SAMPLES = 256 };
#define CELL 64
#define PAYLOAD 56
#define PACKED struct __attribute__((packed))

PACKED enter_record {
    uint64_t sequence, parent;
    int64_t time_ns;
    uint32_t module, step, micro_batch, ordinal;
    uint8_t phase, mode;
    uint16_t thread;
    uint32_t root, collective, number;
};
PACKED exit_record {
    uint64_t sequence;
    int64_t time_ns;
    uint8_t rest[40]; /* no text, 0 for a call that returned */
};
PACKED value_record {
    uint64_t sequence;
    int64_t time_ns;
    uint32_t slot, meta, flags;
    uint8_t phase, pad;
    uint16_t ordinal;
    uint64_t count, hash, reference;
    int64_t counts[4];
    double numbers[5], sketch[SKETCH], added[4];
};
PACKED samples_record {
    uint64_t sequence;
    uint32_t slot;
    uint16_t ordinal;
    uint8_t phase, pad;
    uint32_t count, size;
    uint16_t dim, spare[5];
    float rows[MOST_SAMPLES * SKETCH];
};

#define NAMES(X) \
    X(dtype) X(shape) X(layout) X(is_cpu) X(requires_grad) X(_segment) X(_is_half_done) X(at) \
    X(data_end) X(address) X(write) X(_metas) X(frames) X(last_ended) X(info) X(root) X(scope) \
    X(sequence) X(module) X(phase) X(is_recorded) X(ordinal) X(first_node) X(seen_inputs) \
    X(skips_output) X(outputs) X(definition) X(is_wrapper) X(is_selected) X(is_opaque) X(path) \
    X(is_muted) X(forward_calls) X(without_gradients) X(mode) X(step) X(micro_batch) X(nodes) \
    X(spans) X(latest_spans) X(before_forward) X(after_forward) X(_forward_pre_hooks) \
    X(_forward_hooks) X(__dict__) X(forward) X(is_plain) X(is_on) X(_pending) X(read_parts) \
    X(learn) X(meta_of) X(slot) X(inputs_at_global_hook) X(watch) X(_thread) X(input) \
    X(grad_input) X(output) X(grad_output) X(positional) X(keywords) X(data_ptr) X(is_contiguous) \
    X(is_neg) X(storage_offset) X(untyped_storage) X(nbytes)
#define X(name) n_##name,
enum { NAMES(X) NAME_COUNT };
#undef X
static PyObject *names[NAME_COUNT], *empty, *tuple_class, *list_class, *dict_class, *str_class;

/* A slot: "input", and below it "input.0" or "input.hidden_states". */
struct slot {
    PyObject *text, *below; /* {name or index: address of a slot}, or NULL */
    uint32_t number;
};

/* What all plain tensors of one dtype and shape share. */
struct form {
    PyObject *dtype, *held; /* `held` keeps plan and dtype alive */
    PyObject *described;
    const struct plan *plan;
    int64_t count, item_bytes, shape[MOST_DIMS];
    int requires_grad, dims, batch_dim;
    uint32_t meta, generation;
};

/* `generation` counts tables of descriptions: a number that was given by an earlier one is void. */
struct state {
    PyObject *tracer, *call_values, *reader, *recorder, *writer, *holder, *sequences, *in_flight;
    PyObject *infos, *stacks;
    PyObject *new_call, *call_class, *forward_phase, *tensor_class, *parameter_class, *strided;
    PyObject *mode_count, *graph_task, *is_grad_enabled, *next_node, *new_tuple, *span_class;
    PyObject *is_jit_tracing, *modules, *capture_flags;
    PyObject *metas, *takes; /* {class: (its forward, arguments that leave no keywords)} */
    struct memory *memory;
    struct slot input, output;
    struct form **forms;
    uint32_t generation, forms_dropped, constant_metas[3], constant_generations[3], thread_number;
    unsigned long thread;
    int form_count, wants_backward;
    int running, is_closing; /* hooks under way, on all threads; they end before anything goes */
};
#define FORM_PLACES (2 * MOST_FORMS)

static void drop(PyObject *object) {
    if (object) Py_DecRef(object);
}

static PyObject *get(PyObject *object, int name) {
    return object ? PyObject_GetAttr(object, names[name]) : NULL;
}

static int is(PyObject *object, int name, PyObject *expected) {
    PyObject *value = get(object, name);
    drop(value);
    return value && value == expected;
}

static int is_empty_dict(PyObject *object, int name) {
    PyObject *table = get(object, name);
    int is_empty = table && PyDict_Size(table) == 0;
    drop(table);
    return is_empty;
}

/* Takes a reference; -1 for None, or with an exception. */
static long long as_number(PyObject *value) {
    long long number = value && value != NONE ? PyLong_AsLongLong(value) : -1;
    drop(value);
    return number;
}

static long long get_number(PyObject *object, int name) { return as_number(get(object, name)); }

static long long result_of(PyObject *function) {
    return as_number(PyObject_CallObject(function, NULL));
}

static PyObject *call(PyObject *object, int name) {
    return object ? PyObject_CallMethodObjArgs(object, names[name], NULL) : NULL;
}

static int is_result(PyObject *object, int name, PyObject *expected) {
    PyObject *value = call(object, name);
    drop(value);
    return value && value == expected;
}

static PyObject *answer(PyObject *object) {
    Py_IncRef(object);
    return object;
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* ---- records ---- */

static uint32_t crc_table[256];

static void put_cell(uint8_t *at, int kind, int number, int count, const uint8_t *payload,
                     Size size) {
    uint8_t cell[CELL] = {0};
    uint16_t following = (uint16_t)(count - 1 - number);
    uint32_t crc = ~0u;
    cell[4] = (uint8_t)kind, cell[5] = number == 0;
    memcpy(cell + 6, &following, 2);
    memcpy(cell + 8, payload, (size_t)(size < PAYLOAD ? size : PAYLOAD));
    for (int i = 4; i < CELL; i++) crc = crc_table[(crc ^ cell[i]) & 255] ^ crc >> 8;
    crc = ~crc;
    memcpy(cell, &crc, 4);
    memcpy(at, cell, CELL);
}

/* Commits one record. Between the look at the lock and the move of the end no code of Python runs:
   nobody can write meanwhile. Where a write is under way, or there is no room, Python writes. */
static int commit(struct state *s, int kind, const void *payload, Size size) {
    PyObject *segment = get(s->writer, n__segment);
    int count = (int)((size + PAYLOAD - 1) / PAYLOAD), outcome = -1;
    int is_free = is(s->writer, n__is_half_done, FALSE) && PyDict_Size(s->holder) == 0;
    long long at = get_number(segment, n_at), address = get_number(segment, n_address);
    long long end = at + count * CELL, data_end = get_number(segment, n_data_end);
    if (PyErr_Occurred()) {
    } else if (is_free && end <= data_end) {
        PyObject *new_end = PyLong_FromLongLong(end);
        uint8_t *cells = (uint8_t *)(uintptr_t)address + at;
        for (int i = count - 1; new_end && i >= 0; i--) {
            /* the first cell last: readers take a record for committed once that one is valid */
            if (i == 0) __atomic_thread_fence(__ATOMIC_RELEASE);
            put_cell(cells + i * CELL, kind, i, count, (const uint8_t *)payload + i * PAYLOAD,
                     size - i * PAYLOAD);
        }
        if (new_end) outcome = PyObject_SetAttr(segment, names[n_at], new_end);
        drop(new_end);
    } else {
        PyObject *number = PyLong_FromLongLong(kind), *written = NULL;
        PyObject *bytes = PyBytes_FromStringAndSize(payload, size);
        if (number && bytes)
            written = PyObject_CallMethodObjArgs(s->writer, names[n_write], number, bytes, NULL);
        outcome = written ? 0 : -1;
        drop(number), drop(bytes), drop(written);
    }
    drop(segment);
    return outcome;
}

/* ---- slots and forms ---- */

static struct slot *new_slot(PyObject *text) {
    struct slot *slot = text ? calloc(1, sizeof *slot) : NULL;
    if (slot)
        slot->text = text;
    else
        drop(text);
    return slot;
}

static void clear_slot(struct slot *slot) {
    PyObject *key, *value;
    Size at = 0;
    while (slot->below && PyDict_Next(slot->below, &at, &key, &value)) {
        struct slot *child = PyLong_AsVoidPtr(value);
        clear_slot(child), free(child);
    }
    drop(slot->below), drop(slot->text);
    memset(slot, 0, sizeof *slot);
}

/* Returns the slot of an item by its name or index. */
static struct slot *slot_below(struct slot *around, PyObject *key) {
    if (!around->below && !(around->below = PyDict_New())) return NULL;
    PyObject *known = PyDict_GetItemWithError(around->below, key);
    if (known) return PyLong_AsVoidPtr(known);
    struct slot *slot = NULL;
    if (!PyErr_Occurred()) slot = new_slot(PyUnicode_FromFormat("%U.%S", around->text, key));
    PyObject *address = slot ? PyLong_FromVoidPtr(slot) : NULL;
    if (!address || PyDict_SetItem(around->below, key, address)) slot = NULL;
    drop(address);
    return slot;
}

/* A slot is defined when the first value is recorded in it, as Python does. */
static int define_slot(struct state *s, struct slot *slot) {
    if (!slot->number)
        slot->number = (uint32_t)as_number(
            PyObject_CallMethodObjArgs(s->recorder, names[n_slot], slot->text, NULL));
    return PyErr_Occurred() ? -1 : 0;
}

static void drop_forms(struct state *s) {
    for (int i = 0; i < FORM_PLACES; i++)
        if (s->forms[i]) {
            drop(s->forms[i]->held);
            free(s->forms[i]);
            s->forms[i] = NULL;
        }
    s->form_count = 0;
    s->forms_dropped++;
    if (s->memory) rankscope_forget(s->memory); /* it knows plans by addresses, which recur */
}

/* Fills in what Python says of a kind of tensor, or None of one that is left to Python. */
static int learn(struct state *s, PyObject *tensor, struct form *form) {
    PyObject *facts = PyObject_CallMethodObjArgs(s->reader, names[n_learn], tensor, NULL);
    form->held = facts ? PyTuple_Pack(2, facts, form->dtype) : NULL;
    if (form->held && facts != NONE) {
        form->plan = PyLong_AsVoidPtr(PyTuple_GetItem(facts, 0));
        form->count = PyLong_AsLongLong(PyTuple_GetItem(facts, 1));
        form->item_bytes = PyLong_AsLongLong(PyTuple_GetItem(facts, 2));
        form->batch_dim = (int)PyLong_AsLongLong(PyTuple_GetItem(facts, 3));
        form->described = PyTuple_GetItem(facts, 4);
    }
    drop(facts);
    return PyErr_Occurred() ? -1 : 0;
}

/* Returns NULL, without an exception, for a kind that is left to Python. */
static struct form *form_of(struct state *s, PyObject *tensor, const struct form *wanted) {
    size_t shape_bytes = sizeof(int64_t) * (size_t)wanted->dims;
    uint64_t h = (uint64_t)(uintptr_t)wanted->dtype ^ (uint64_t)wanted->requires_grad << 60;
    for (int i = 0; i < wanted->dims; i++) h = (h ^ (uint64_t)wanted->shape[i]) * PRIME64_1;
    int at = (int)((h ^ h >> 32) % FORM_PLACES);
    for (; s->forms[at]; at = (at + 1) % FORM_PLACES) {
        struct form *form = s->forms[at];
        if (form->dtype == wanted->dtype && form->requires_grad == wanted->requires_grad &&
            form->dims == wanted->dims && !memcmp(form->shape, wanted->shape, shape_bytes))
            return form;
    }
    struct form *form = malloc(sizeof *form);
    if (!form) return (struct form *)PyErr_NoMemory();
    *form = *wanted;
    if (learn(s, tensor, form) || !form->plan) {
        drop(form->held);
        free(form);
        return NULL;
    }
    if (s->form_count >= MOST_FORMS) drop_forms(s);
    while (s->forms[at]) at = (at + 1) % FORM_PLACES;
    s->forms[at] = form, s->form_count++;
    return form;
}

/* The number of a description, or of that of a value that is no tensor; 0 with an exception. */
static uint32_t meta_number(struct state *s, PyObject *described) {
    long long number =
        as_number(PyObject_CallMethodObjArgs(s->reader, names[n_meta_of], described, NULL));
    return number < 0 ? 0 : (uint32_t)number;
}

/* A black box gives numbers of descriptions anew when it lets go of earlier steps. */
static int follow_metas(struct state *s) {
    PyObject *metas = get(s->recorder, n__metas);
    if (metas && metas != s->metas) {
        drop(s->metas);
        s->metas = metas, s->generation++;
    } else
        drop(metas);
    return metas ? 0 : -1;
}

/* ---- values ---- */

struct reading {
    uint64_t sequence;
    PyObject *path, *phase;
    PyObject *tensors; /* [(slot, tensor)] of those that need a gradient, NULL for none */
    int phase_number, depth;
    PyObject *around[MOST_DEPTH];
};

static int add_tensor(struct reading *r, PyObject *slot, PyObject *tensor) {
    PyObject *pair = slot && tensor ? PyTuple_Pack(2, slot, tensor) : NULL;
    if (pair && !r->tensors) r->tensors = PyList_New(0);
    int outcome = pair && r->tensors ? PyList_Append(r->tensors, pair) : -1;
    drop(pair);
    return outcome;
}

/* Has Python read a value: whatever it is, with all that is in it. */
static int leave_to_python(struct state *s, struct reading *r, struct slot *slot, PyObject *value) {
    PyObject *sequence = PyLong_FromLongLong((long long)r->sequence), *tensors = NULL;
    PyObject *is_in_itself = FALSE;
    for (int i = 0; i < r->depth; i++)
        if (r->around[i] == value) is_in_itself = TRUE;
    if (sequence)
        tensors = PyObject_CallMethodObjArgs(s->reader, names[n_read_parts], slot->text, value,
                                             sequence, r->path, r->phase, is_in_itself, NULL);
    int outcome = tensors ? 0 : -1;
    for (Size i = 0; !outcome && i < PyList_Size(tensors); i++) {
        PyObject *pair = PyList_GetItem(tensors, i);
        outcome = add_tensor(r, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1));
    }
    drop(sequence), drop(tensors);
    return outcome;
}

/* Returns 1 with the form and the address of a plain tensor whose memory may be read as it lies, 0
   for any other, which Python shall look at, -1 with an exception. */
static int describe(struct state *s, PyObject *tensor, struct form **form, long long *address) {
    struct form wanted = {0};
    PyObject *shape = NULL, *storage = NULL;
    int outcome = 0;
    if (!is(tensor, n_layout, s->strided) || !is(tensor, n_is_cpu, TRUE)) goto done;
    wanted.requires_grad = is(tensor, n_requires_grad, TRUE);
    wanted.dtype = get(tensor, n_dtype), shape = get(tensor, n_shape);
    if (!wanted.dtype || !shape || (wanted.dims = (int)PyTuple_Size(shape)) > MOST_DIMS) goto done;
    for (int i = 0; i < wanted.dims; i++)
        wanted.shape[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    if (!is_result(tensor, n_is_neg, FALSE) || !is_result(tensor, n_is_contiguous, TRUE)) goto done;
    *address = as_number(call(tensor, n_data_ptr));
    if (*address == 0 || PyErr_Occurred()) goto done;
    if (!(*form = form_of(s, tensor, &wanted))) outcome = PyErr_Occurred() ? -1 : 0;
    if (!*form) goto done;
    /* FSDP frees the memory under a tensor that is still the same */
    storage = call(tensor, n_untyped_storage);
    long long bytes = as_number(call(storage, n_nbytes));
    long long end = as_number(call(tensor, n_storage_offset)) + (*form)->count;
    outcome = !PyErr_Occurred() && end * (*form)->item_bytes <= bytes;
done:
    drop(wanted.dtype), drop(shape), drop(storage);
    /* nested, lazy and functorch tensors refuse to tell their shape or memory */
    if (outcome == 0) PyErr_Clear();
    return outcome;
}

/* Records None, True or False. */
static int write_constant(struct state *s, struct reading *r, struct slot *slot, PyObject *value,
                          int which) {
    struct value_record record = {.sequence = r->sequence, .flags = PYTHON | STRUCTURE};
    if (define_slot(s, slot)) return -1;
    if (s->constant_generations[which] != s->generation) {
        if (!(s->constant_metas[which] = meta_number(s, value))) return -1;
        s->constant_generations[which] = s->generation;
    }
    record.time_ns = now_ns(), record.slot = slot->number, record.meta = s->constant_metas[which];
    record.phase = (uint8_t)r->phase_number;
    return commit(s, VALUE, &record, PAYLOAD);
}

static int write_tensor(struct state *s, struct reading *r, struct slot *slot,
                        const struct form *form, const struct result *result, int is_known) {
    int samples = form->plan->batch ? (int)form->plan->samples : 0;
    struct value_record record = {
        .sequence = r->sequence, .time_ns = now_ns(), .slot = slot->number, .meta = form->meta,
        .flags = (samples ? HAS_SAMPLES : 0) | (is_known ? REUSED : 0),
        .phase = (uint8_t)r->phase_number, .count = (uint64_t)form->count, .hash = result->hash};
    memcpy(record.counts, &result->nan, sizeof record.counts);
    memcpy(record.numbers, &result->low, sizeof record.numbers);
    memcpy(record.sketch, result->sketch, sizeof record.sketch);
    if (commit(s, VALUE, &record, sizeof record)) return -1;
    if (!samples) return 0;
    struct samples_record rows;
    size_t head = offsetof(struct samples_record, rows);
    size_t bytes = (size_t)samples * SKETCH * sizeof(float);
    memset(&rows, 0, head);
    rows.sequence = r->sequence, rows.slot = slot->number, rows.phase = (uint8_t)r->phase_number;
    rows.count = (uint32_t)samples, rows.size = SKETCH, rows.dim = (uint16_t)form->batch_dim;
    memcpy(rows.rows, result->rows32, bytes);
    return commit(s, SAMPLES, &rows, (Size)(head + bytes));
}

static int read_tensor(struct state *s, struct reading *r, struct slot *slot, PyObject *tensor) {
    struct form *form = NULL;
    struct result result;
    long long address;
    int outcome = describe(s, tensor, &form, &address);
    if (outcome < 0) return -1;
    if (!outcome) return leave_to_python(s, r, slot, tensor);
    /* forms may be dropped while another thread runs */
    struct form held = *form;
    uint32_t dropped = s->forms_dropped;
    void *thread = held.count > MOST_WITH_LOCK ? (Py_IncRef(held.held), PyEval_SaveThread()) : NULL;
    const void *words = (const void *)(uintptr_t)address;
    outcome = rankscope_read(s->memory, held.plan, (uint64_t)address, words, &result);
    if (thread) PyEval_RestoreThread(thread);
    if (outcome == REFUSED)
        outcome = leave_to_python(s, r, slot, tensor);
    else if (define_slot(s, slot))
        outcome = -1;
    else {
        if (held.generation != s->generation) {
            held.meta = meta_number(s, held.described), held.generation = s->generation;
            if (held.meta && s->forms_dropped == dropped) *form = held;
        }
        outcome = held.meta ? write_tensor(s, r, slot, &held, &result, outcome == KNOWN) : -1;
        if (!outcome && held.requires_grad && s->wants_backward)
            outcome = add_tensor(r, slot->text, tensor);
    }
    if (thread) drop(held.held);
    return outcome;
}

static int read_value(struct state *s, struct reading *r, struct slot *slot, PyObject *value);

/* Records the items of a tuple, a list or a dict; Python does it for long ones, and for keys that
   are no short texts. */
static int read_items(struct state *s, struct reading *r, struct slot *slot, PyObject *value,
                      PyObject *kind, Size size) {
    PyObject *keys[LONG_SEQUENCE] = {0}, *items[LONG_SEQUENCE];
    int outcome = 0, is_usual = 1;
    Size at = 0;
    if (size > LONG_SEQUENCE) return leave_to_python(s, r, slot, value);
    for (Size i = 0; i < size; i++) {
        if (kind != dict_class) {
            keys[i] = PyLong_FromLongLong(i);
            items[i] = kind == list_class ? PyList_GetItem(value, i) : PyTuple_GetItem(value, i);
        } else if (PyDict_Next(value, &at, keys + i, items + i)) {
            PyObject *key_kind = PyObject_Type(answer(keys[i]));
            is_usual &= key_kind == str_class && PyUnicode_GetLength(keys[i]) <= LONG_NAME;
            drop(key_kind);
        }
        Py_IncRef(items[i]); /* held: Python that reads one of them may change the container */
    }
    if (!is_usual) outcome = leave_to_python(s, r, slot, value);
    r->around[r->depth++] = value;
    for (Size i = 0; i < size; i++) {
        struct slot *below = outcome || !is_usual ? NULL : slot_below(slot, keys[i]);
        if (is_usual) outcome = below ? read_value(s, r, below, items[i]) : -1;
        drop(keys[i]), drop(items[i]);
    }
    r->depth--;
    return outcome;
}

/* Records every leaf of a value, in the order of rankscope.capture.pytree.walk. */
static int read_value(struct state *s, struct reading *r, struct slot *slot, PyObject *value) {
    PyObject *kind = PyObject_Type(value), *constants[] = {NONE, TRUE, FALSE};
    Py_DecRef(kind); /* it lives as long as the value */
    if (kind == s->tensor_class || kind == s->parameter_class)
        return read_tensor(s, r, slot, value);
    for (int i = 0; i < 3; i++)
        if (value == constants[i]) return write_constant(s, r, slot, value, i);
    Size size = kind == tuple_class  ? PyTuple_Size(value)
                : kind == list_class ? PyList_Size(value)
                : kind == dict_class ? PyDict_Size(value)
                                     : -1;
    if (!size && !r->depth) return 0; /* empty, and no part of another */
    for (int i = 0; i < r->depth; i++)
        if (r->around[i] == value) size = 0;
    if (size <= 0 || r->depth >= MOST_DEPTH) return leave_to_python(s, r, slot, value);
    return read_items(s, r, slot, value, kind, size);
}

/* ---- calls ---- */

/* True where a call can have no keywords: its forward takes no more arguments than it was given. */
static int has_no_keywords(struct state *s, PyObject *module, PyObject *arguments) {
    PyObject *kind = PyObject_Type(module), *own = get(module, n___dict__);
    PyObject *forward = get(kind, n_forward);
    if (!forward || !own) PyErr_Clear(); /* scripted modules have neither */
    PyObject *known = forward ? PyDict_GetItemWithError(s->takes, kind) : NULL, *pair = NULL;
    if (forward && (!known || PyTuple_GetItem(known, 0) != forward)) {
        PyObject *count = PyObject_CallMethodObjArgs(s->reader, names[n_positional], forward, NULL);
        known = pair = count ? PyTuple_Pack(2, forward, count) : NULL;
        if (pair && PyDict_SetItem(s->takes, kind, pair)) known = NULL;
        drop(count);
    }
    int outcome = known && own && !PyDict_GetItemWithError(own, names[n_forward]) &&
                  PyLong_AsLongLong(PyTuple_GetItem(known, 1)) == PyTuple_Size(arguments);
    drop(own), drop(forward), drop(kind), drop(pair);
    return outcome;
}

/* 1 where values may be read here, 2 where none is read, 0 while a collective may write them, or a
   mode of torch would see the reading. */
static int may_read(struct state *s) {
    if (is(s->reader, n_is_on, FALSE)) return 2;
    PyObject *pending = get(s->reader, n__pending);
    int may = pending && PyList_Size(pending) == 0 && is(s->reader, n_is_plain, TRUE) &&
              PyDict_Size(s->in_flight) == 0 && result_of(s->mode_count) == 0;
    drop(pending);
    return may;
}

static int watch(struct state *s, struct reading *r, PyObject *frame, int kind, int gradients) {
    if (!r->tensors) return 0;
    PyObject *done = PyObject_CallMethodObjArgs(s->call_values, names[n_watch], frame, r->tensors,
                                                names[kind], names[gradients], NULL);
    drop(done);
    return done ? 0 : -1;
}

/* The innermost open call, and its attributes that a call inside it needs. */
struct around {
    PyObject *frames, *frame, *info, *scope, *sequence;
};

static int find_around(struct state *s, struct around *a) {
    a->frames = get(s->stacks, n_frames);
    Size depth = a->frames ? PyList_Size(a->frames) : 0;
    if (depth <= 0) return 0;
    a->frame = answer(PyList_GetItem(a->frames, depth - 1));
    a->info = get(a->frame, n_info), a->scope = get(a->frame, n_scope);
    a->sequence = get(a->frame, n_sequence);
    return a->info && a->scope && a->sequence;
}

/* True while something writes down the operations of a module, as `is_being_captured`: a flag is an
   attribute of an attribute ... of a module. */
static int is_captured(struct state *s) {
    PyObject *jit = PyObject_CallObject(s->is_jit_tracing, NULL);
    int captured = jit != FALSE;
    drop(jit);
    for (Size i = 0; !captured && i < PyTuple_Size(s->capture_flags); i++) {
        PyObject *path = PyTuple_GetItem(s->capture_flags, i);
        PyObject *value = PyDict_GetItemWithError(s->modules, PyTuple_GetItem(path, 0));
        for (Size j = 1; value && j < PyTuple_Size(path); j++) {
            PyObject *attributes = get(value, n___dict__);
            PyObject *name = PyTuple_GetItem(path, j);
            value = attributes ? PyDict_GetItemWithError(attributes, name) : NULL;
            drop(attributes); /* the object holds it */
        }
        captured = value && value != NONE && value != FALSE;
    }
    return captured;
}

/* A root inside other calls may mean that a call around it was abandoned: Python looks. */
static int is_inner_module(PyObject *info) {
    PyObject *path = get(info, n_path);
    int is_inner = path && PyUnicode_GetLength(path) > 0;
    drop(path);
    return is_inner;
}

/* What has to be true of a call for this way: nothing that `Tracer.before_forward` treats apart. */
static int is_ordinary_call(struct state *s, struct around *a, PyObject *entry, PyObject *module) {
    PyObject *alive = PyObject_CallObject(PyTuple_GetItem(entry, 0), NULL);
    PyObject *info = PyTuple_GetItem(entry, 1);
    PyObject *root = get(info, n_root), *around_root = get(a->info, n_root);
    int is_so = alive == module && root && (root == NONE || root == around_root) &&
                is_inner_module(info) && get_number(info, n_definition) > 0 &&
                is(info, n_is_wrapper, FALSE) && is(info, n_is_selected, TRUE) &&
                is(a->info, n_is_opaque, FALSE) && is(a->scope, n_is_muted, FALSE) &&
                is_empty_dict(a->scope, n_without_gradients) &&
                is_empty_dict(module, n__forward_pre_hooks) && result_of(s->graph_task) == -1;
    drop(alive), drop(root), drop(around_root);
    if (is_so && get_number(a->scope, n_mode) == 0) { /* a train step */
        PyObject *with_gradients = PyObject_CallObject(s->is_grad_enabled, NULL);
        is_so = with_gradients == TRUE;
        drop(with_gradients);
    }
    return is_so && !is_captured(s);
}

static PyObject *new_frame(struct state *s, PyObject *module, PyObject *info, PyObject *scope,
                           PyObject *sequence, PyObject *ordinal) {
    PyObject *frame = PyObject_CallFunctionObjArgs(s->new_call, s->call_class, NULL);
    PyObject *zero = PyLong_FromLongLong(0);
    const struct { int name; PyObject *value; } fields[] = {
        {n_module, module}, {n_info, info}, {n_scope, scope}, {n_phase, s->forward_phase},
        {n_sequence, sequence}, {n_is_recorded, TRUE}, {n_ordinal, ordinal}, {n_first_node, zero},
        {n_seen_inputs, NONE}, {n_skips_output, FALSE}, {n_outputs, empty}};
    for (size_t i = 0; frame && zero && i < sizeof fields / sizeof *fields; i++)
        PyObject_SetAttr(frame, names[fields[i].name], fields[i].value);
    drop(zero);
    return frame;
}

/* Notes where the nodes of a call begin, as `NodeMap.begin`; at its end also which they were. */
static int follow_nodes(struct state *s, PyObject *frame, const struct around *ending) {
    PyObject *nodes = get(s->tracer, n_nodes);
    if (nodes == NONE) return Py_DecRef(nodes), 0;
    PyObject *last = PyObject_CallObject(s->next_node, NULL);
    if (ending && nodes && last) {
        PyObject *first = get(frame, n_first_node), *spans = get(nodes, n_spans);
        PyObject *latest = get(nodes, n_latest_spans);
        PyObject *fields = NULL, *span = NULL, *of_thread = NULL;
        PyObject *ident = PyLong_FromLongLong((long long)PyThread_get_thread_ident());
        if (first)
            fields = PyTuple_Pack(5, first, last, ending->info, ending->scope, ending->sequence);
        if (fields) span = PyObject_CallFunctionObjArgs(s->new_tuple, s->span_class, fields, NULL);
        if (span && latest) PyDict_SetItem(latest, ending->info, span);
        if (span && spans && ident && PyLong_AsLongLong(last) > PyLong_AsLongLong(first)) {
            of_thread = PyDict_GetItemWithError(spans, ident);
            if (of_thread)
                Py_IncRef(of_thread);
            else if ((of_thread = PyList_New(0)))
                PyDict_SetItem(spans, ident, of_thread);
            if (of_thread) PyList_Append(of_thread, span);
        }
        drop(first), drop(spans), drop(latest), drop(fields), drop(span), drop(of_thread);
        drop(ident);
    }
    if (last) PyObject_SetAttr(frame, names[n_first_node], last);
    drop(last), drop(nodes);
    return PyErr_Occurred() ? -1 : 0;
}

static uint32_t thread_number(struct state *s) {
    unsigned long thread = PyThread_get_thread_ident();
    if (thread != s->thread || !s->thread_number) {
        PyObject *ident = PyLong_FromLongLong((long long)thread);
        if (ident)
            s->thread_number = (uint32_t)as_number(
                PyObject_CallMethodObjArgs(s->recorder, names[n__thread], ident, NULL));
        s->thread = thread;
        drop(ident);
    }
    return s->thread_number;
}

static void read_inputs(struct state *s, struct reading *r, PyObject *frame, PyObject *module,
                        PyObject *arguments) {
    int may = may_read(s);
    PyObject *keywords = NULL;
    if (PyErr_Occurred() || may == 2) return;
    if (!has_no_keywords(s, module, arguments) && !PyErr_Occurred())
        keywords = PyObject_CallMethodObjArgs(s->reader, names[n_keywords], NULL);
    if (PyErr_Occurred() || follow_metas(s)) {
    } else if (!may || keywords == NONE)
        drop(PyObject_CallMethodObjArgs(s->call_values, names[n_inputs_at_global_hook], frame,
                                        module, arguments, keywords ? keywords : NONE, NULL));
    else if (!read_value(s, r, &s->input, arguments) &&
             (!keywords || !read_value(s, r, &s->input, keywords)))
        watch(s, r, frame, n_input, n_grad_input);
    drop(keywords);
}

/* Records that a call begins, and what it is handed. */
static void begin_call(struct state *s, struct around *a, PyObject *module, PyObject *info,
                       PyObject *arguments) {
    struct reading r = {.phase = s->forward_phase, .path = get(info, n_path)};
    PyObject *calls = get(a->scope, n_forward_calls), *root = get(info, n_root);
    PyObject *last = calls ? PyDict_GetItemWithError(calls, info) : NULL;
    PyObject *ordinal = NULL, *sequence = NULL, *frame = NULL;
    long long number = last ? PyLong_AsLongLong(last) + 1 : 0;
    if (!PyErr_Occurred()) ordinal = PyLong_FromLongLong(number);
    if (ordinal && !PyDict_SetItem(calls, info, ordinal)) sequence = PyIter_Next(s->sequences);
    if (!sequence) goto done;
    r.sequence = (uint64_t)PyLong_AsLongLong(sequence);
    r.phase_number = (int)PyLong_AsLongLong(r.phase);
    struct enter_record record = {
        .sequence = r.sequence, .parent = (uint64_t)as_number(answer(a->sequence)),
        .time_ns = now_ns(), .module = (uint32_t)get_number(info, n_definition),
        .step = (uint32_t)get_number(a->scope, n_step), .ordinal = (uint32_t)number,
        .micro_batch = (uint32_t)get_number(a->scope, n_micro_batch),
        .phase = (uint8_t)r.phase_number, .mode = (uint8_t)get_number(a->scope, n_mode),
        .thread = (uint16_t)thread_number(s),
        .root = root == NONE ? 0 : (uint32_t)get_number(root, n_definition)};
    if (PyErr_Occurred() || commit(s, ENTER, &record, sizeof record)) goto done;
    frame = new_frame(s, module, info, a->scope, sequence, ordinal);
    if (!PyErr_Occurred() && !PyList_Append(a->frames, frame) && !follow_nodes(s, frame, NULL))
        read_inputs(s, &r, frame, module, arguments);
done:
    drop(r.path), drop(r.tensors), drop(calls), drop(root), drop(ordinal), drop(sequence);
    drop(frame);
}

/* Records what a call returned, and that it ends. */
static void end_call(struct state *s, struct around *a, PyObject *output, int may) {
    struct reading r = {.phase = s->forward_phase, .path = get(a->info, n_path)};
    Size depth = PyList_Size(a->frames);
    struct exit_record record = {.sequence = (uint64_t)PyLong_AsLongLong(a->sequence)};
    r.sequence = record.sequence, r.phase_number = (int)PyLong_AsLongLong(r.phase);
    if (!PyErr_Occurred() && !PyList_SetSlice(a->frames, depth - 1, depth, NULL) &&
        !follow_nodes(s, a->frame, a) && !PyObject_SetAttr(s->stacks, names[n_last_ended], NONE) &&
        !follow_metas(s) &&
        (may == 2 || (!read_value(s, &r, &s->output, output) &&
                      !watch(s, &r, a->frame, n_output, n_grad_output)))) {
        record.time_ns = now_ns();
        commit(s, EXIT, &record, sizeof record);
    }
    drop(r.path), drop(r.tensors);
}

static void clear(struct state *s);

/* Ends a hook: has Python take a call of which nothing was done. */
static PyObject *end_hook(struct state *s, struct around *a, int is_done, int python_hook,
                          PyObject *const *arguments, Size count) {
    PyObject *outcome = NULL, *g[4] = {0};
    for (int i = 0; i < count && i < 4; i++) g[i] = arguments[i];
    drop(a->frames), drop(a->frame), drop(a->info), drop(a->scope), drop(a->sequence);
    if (!PyErr_Occurred())
        outcome = is_done ? answer(NONE)
                          : PyObject_CallMethodObjArgs(s->tracer, names[python_hook], g[0], g[1],
                                                       g[2], g[3], NULL);
    if (--s->running == 0 && s->is_closing) clear(s);
    return outcome;
}

/* The global forward pre-hook: (module, args). */
static PyObject *before(PyObject *capsule, PyObject *const *arguments, Size count) {
    struct state *s = PyCapsule_GetPointer(capsule, CAPSULE);
    struct around a = {0};
    int is_done = 0;
    if (!s || s->is_closing) return s ? answer(NONE) : NULL;
    s->running++;
    if (count == 2 && find_around(s, &a)) {
        PyObject *key = PyLong_FromVoidPtr(arguments[0]);
        PyObject *entry = key ? PyDict_GetItemWithError(s->infos, key) : NULL;
        if (entry) {
            Py_IncRef(entry);
            is_done = is_ordinary_call(s, &a, entry, arguments[0]) && !PyErr_Occurred();
            if (is_done) begin_call(s, &a, arguments[0], PyTuple_GetItem(entry, 1), arguments[1]);
            Py_DecRef(entry);
        }
        drop(key);
    }
    return end_hook(s, &a, is_done, n_before_forward, arguments, count);
}

/* The global forward hook: (module, args, kwargs, output). */
static PyObject *after(PyObject *capsule, PyObject *const *arguments, Size count) {
    struct state *s = PyCapsule_GetPointer(capsule, CAPSULE);
    struct around a = {0};
    int may = 0;
    if (!s || s->is_closing) return s ? answer(NONE) : NULL;
    s->running++;
    if (count == 4 && find_around(s, &a) && is(a.frame, n_module, arguments[0]) &&
        a.sequence != NONE && is(a.frame, n_is_recorded, TRUE) &&
        is(a.frame, n_phase, s->forward_phase) && is(a.frame, n_seen_inputs, NONE) &&
        is(a.frame, n_skips_output, FALSE) &&
        is_inner_module(a.info) && is_empty_dict(arguments[0], n__forward_hooks) &&
        PyList_Size(a.frames) > 1 && (may = may_read(s)) && !PyErr_Occurred())
        end_call(s, &a, arguments[3], may);
    return end_hook(s, &a, may != 0, n_after_forward, arguments, count);
}

/* ---- life ---- */

static void clear(struct state *s) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    s->memory = NULL; /* it goes with the reader */
    for (PyObject **object = &s->tracer; object <= &s->takes; object++) {
        PyObject *held = *object;
        *object = NULL;
        drop(held);
    }
    drop_forms(s);
    clear_slot(&s->input), clear_slot(&s->output);
    PyErr_Restore(kind, value, trace);
}

/* Lets go of the session, which refers to these hooks. */
static PyObject *close_hooks(PyObject *capsule, PyObject *ignored) {
    struct state *s = PyCapsule_GetPointer(capsule, CAPSULE);
    (void)ignored;
    if (!s) return NULL;
    s->is_closing = 1;
    if (!s->running) clear(s);
    return answer(NONE);
}

static void free_state(PyObject *capsule) {
    struct state *s = PyCapsule_GetPointer(capsule, CAPSULE);
    clear(s);
    free(s->forms), free(s);
}

static PyMethodDef definitions[] = {
    {"before", (PyCFunction)(void *)before, METH_FASTCALL, NULL},
    {"after", (PyCFunction)(void *)after, METH_FASTCALL, NULL},
    {"close", close_hooks, METH_NOARGS, NULL},
};

/* Finds, once in a process, what does not depend on a session. */
static void prepare(void) {
    if (crc_table[1]) return;
#define X(name) names[n_##name] = PyUnicode_InternFromString(#name);
    NAMES(X)
#undef X
    empty = PyTuple_New(0), tuple_class = PyObject_Type(empty), str_class = PyObject_Type(names[0]);
    list_class = PyObject_Type(PyList_New(0)), dict_class = PyObject_Type(PyDict_New());
    for (uint32_t i = 0; i < 256 && !PyErr_Occurred(); i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_table[i] = crc;
    }
}

/* Returns (before, after, close) for one session. `things`: the address of the memory of values,
   whether gradients are watched, then the objects of `struct state` up to `capture_flags`, in
   their order. */
PyObject *rankscope_hooks(PyObject *things) {
    struct state *s = calloc(1, sizeof *s);
    PyObject *capsule = NULL, *made[3] = {0}, *functions = NULL;
    prepare();
    if (s && (s->forms = calloc(FORM_PLACES, sizeof *s->forms)))
        capsule = PyCapsule_New(s, CAPSULE, free_state);
    if (!capsule) return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    s->memory = PyLong_AsVoidPtr(PyTuple_GetItem(things, 0));
    s->wants_backward = PyTuple_GetItem(things, 1) == TRUE;
    PyObject **object = &s->tracer;
    for (Size i = 2; object <= &s->capture_flags && (*object = PyTuple_GetItem(things, i)); i++)
        Py_IncRef(*object++);
    s->takes = PyDict_New();
    s->input.text = answer(names[n_input]), s->output.text = answer(names[n_output]);
    for (int i = 0; i < 3; i++) made[i] = PyCFunction_NewEx(definitions + i, capsule, NULL);
    if (!PyErr_Occurred()) functions = PyTuple_Pack(3, made[0], made[1], made[2]);
    for (int i = 0; i < 3; i++) drop(made[i]);
    drop(capsule);
    return functions;
}
