// Calls of CUDA's driver and of cuBLASLt that are the same each time but for their arguments, as callables of Python: what
// lpq/kernels/cuda.py and cublaslt.py do by ctypes, in half of the time. See lpq/kernels/native.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST 96  // letters of a kernel's arguments

// CUlaunchConfig, which has no version: cuLaunchKernelEx takes it as it is.
typedef struct {
    unsigned grid[3], block[3], shared;
    void* stream;
    void* attributes;
    unsigned count;
} Config;

typedef int (*Driver)(const Config*, void*, void**, void**);
typedef int (*Matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                      void*, void*, const void*, void*, size_t, void*);
typedef int (*SetAttribute)(void*, int, const void*, size_t);

// The stream that is torch's current one for a device, by torch's own function.
static int stream_of(PyObject* current_stream, PyObject* device, void** out) {
    PyObject* found = PyObject_CallOneArg(current_stream, device);
    if (!found) return -1;
    *out = PyLong_AsVoidPtr(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

// ---------------------------------------------------------------------------------------------- a launch

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Driver driver;
    Config config;
    void* function;
    PyObject *device, *current_device, *current_stream, *slowly;
    long index;
    int letters, parameters;
    char letter[MOST], first[MOST];  // of each argument; of each parameter, which may have several
} Launch;

// An error that cannot be told here is left to the launch in Python, which has words for it.
static PyObject* slowly(Launch* self, PyObject* const* args, Py_ssize_t n) {
    PyErr_Clear();
    return PyObject_Vectorcall(self->slowly, args, (size_t)n, NULL);
}

static PyObject* launch(PyObject* of, PyObject* const* args, size_t flags, PyObject* names) {
    Launch* self = (Launch*)of;
    const Py_ssize_t n = PyVectorcall_NARGS(flags);
    uint64_t slots[MOST];
    void* parameters[MOST];
    if (n != self->letters || names) return slowly(self, args, n);
    PyObject* device = PyObject_CallNoArgs(self->current_device);
    if (!device) return NULL;
    const long index = PyLong_AsLong(device);
    Py_DECREF(device);
    if (index != self->index) return slowly(self, args, n);
    for (int i = 0; i < n; ++i) {
        slots[i] = 0;
        switch (self->letter[i]) {
        case 'f': {
            const double value = PyFloat_AsDouble(args[i]);
            const float narrow = (float)value;
            if (value - value == 0 && narrow - narrow != 0) return slowly(self, args, n);  // too large for it
            memcpy(&slots[i], &narrow, 4);
            break;
        }
        case 'd': {
            const double value = PyFloat_AsDouble(args[i]);
            memcpy(&slots[i], &value, 8);
            break;
        }
        case 'P':
            slots[i] = PyLong_AsUnsignedLongLong(args[i]);
            break;
        case 'I': {
            const unsigned long value = PyLong_AsUnsignedLong(args[i]);
            if (value > UINT32_MAX) return slowly(self, args, n);
            slots[i] = value;
            break;
        }
        case 'i': {
            const long value = PyLong_AsLong(args[i]);
            if (value > INT32_MAX || value < INT32_MIN) return slowly(self, args, n);
            slots[i] = (uint32_t)value;
            break;
        }
        default:
            slots[i] = (uint64_t)PyLong_AsLongLong(args[i]);
        }
        if (PyErr_Occurred()) return slowly(self, args, n);  // the next argument may be an object of Python, with code
    }
    for (int i = 0; i < self->parameters; ++i) parameters[i] = &slots[(int)self->first[i]];
    Config config = self->config;
    if (stream_of(self->current_stream, self->device, &config.stream)) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = self->driver(&config, self->function, parameters, NULL);
    Py_END_ALLOW_THREADS
    if (status) return slowly(self, args, n);
    Py_RETURN_NONE;
}

static PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject* names) {
    unsigned long long driver, config, function;
    const char *letters, *first;
    Py_ssize_t count, parameters;
    PyObject *device, *current_device, *current_stream, *in_python;
    if (!PyArg_ParseTuple(args, "KKKs#y#OOOO", &driver, &config, &function, &letters, &count, &first, &parameters, &device,
                          &current_device, &current_stream, &in_python))
        return NULL;
    if (count > MOST || parameters > count) return PyErr_Format(PyExc_ValueError, "%zd arguments are too many", count);
    const long index = PyLong_AsLong(device);
    if (PyErr_Occurred()) return NULL;
    Launch* self = (Launch*)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = launch;
    self->driver = (Driver)(uintptr_t)driver;
    memcpy(&self->config, (const void*)(uintptr_t)config, sizeof(Config));
    self->function = (void*)(uintptr_t)function;
    self->letters = (int)count, self->parameters = (int)parameters;
    memcpy(self->letter, letters, (size_t)count), memcpy(self->first, first, (size_t)parameters);
    self->index = index, self->device = Py_NewRef(device), self->current_device = Py_NewRef(current_device);
    self->current_stream = Py_NewRef(current_stream), self->slowly = Py_NewRef(in_python);
    return (PyObject*)self;
}

static void launch_free(PyObject* of) {
    Launch* self = (Launch*)of;
    Py_XDECREF(self->device), Py_XDECREF(self->current_device);
    Py_XDECREF(self->current_stream), Py_XDECREF(self->slowly);
    Py_TYPE(of)->tp_free(of);
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lpq_calls.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = launch_new,
    .tp_dealloc = launch_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Launch, call),
};

// ---------------------------------------------------------------------------------------------- a product

static const float ONE_AND_ZERO[2] = {1.0f, 0.0f};

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    pthread_mutex_t turn;
    Matmul matmul;
    SetAttribute set;
    void *handle, *description, *first, *second, *result, *algorithm;
    size_t workspace;
    int scales[2], bias;  // attributes of the description; `scales` are 0 where the product has a factor on the device
    PyObject *device, *current_stream;
} Product;

// product(left, right, a, b, out, workspace), all addresses: `a` and `b` are the scales of both, or else a factor with a
// zero behind it, and a bias or 0. It returns a status.
static PyObject* multiply(PyObject* of, PyObject* const* args, size_t flags, PyObject* names) {
    Product* self = (Product*)of;
    void *at[6], *stream;
    if (PyVectorcall_NARGS(flags) != 6 || names) return PyErr_Format(PyExc_TypeError, "a product takes 6 addresses");
    for (int i = 0; i < 6; ++i) {
        at[i] = PyLong_AsVoidPtr(args[i]);
        if (!at[i] && PyErr_Occurred()) return NULL;
    }
    if (stream_of(self->current_stream, self->device, &stream)) return NULL;
    const float* factor = self->scales[0] ? ONE_AND_ZERO : (const float*)at[2];
    int status = 0;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->turn);
    if (self->scales[0]) {
        status = self->set(self->description, self->scales[0], &at[3], sizeof(void*));
        if (!status) status = self->set(self->description, self->scales[1], &at[2], sizeof(void*));
    } else if (at[3]) {
        status = self->set(self->description, self->bias, &at[3], sizeof(void*));
    }
    if (!status)
        status = self->matmul(self->handle, self->description, factor, at[1], self->first, at[0], self->second, factor + 1,
                              at[4], self->result, at[4], self->result, self->algorithm, at[5], self->workspace, stream);
    pthread_mutex_unlock(&self->turn);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static PyObject* product_new(PyTypeObject* type, PyObject* args, PyObject* names) {
    unsigned long long at[8], workspace;
    int scales[2], bias;
    PyObject *device, *current_stream;
    if (!PyArg_ParseTuple(args, "KKKKKKKKKiiiOO", at, at + 1, at + 2, at + 3, at + 4, at + 5, at + 6, at + 7, &workspace,
                          scales, scales + 1, &bias, &device, &current_stream))
        return NULL;
    Product* self = (Product*)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->call = multiply;
    pthread_mutex_init(&self->turn, NULL);
    self->matmul = (Matmul)(uintptr_t)at[0], self->set = (SetAttribute)(uintptr_t)at[1];
    self->handle = (void*)(uintptr_t)at[2], self->description = (void*)(uintptr_t)at[3];
    self->first = (void*)(uintptr_t)at[4], self->second = (void*)(uintptr_t)at[5];
    self->result = (void*)(uintptr_t)at[6], self->algorithm = (void*)(uintptr_t)at[7];
    self->workspace = (size_t)workspace;
    memcpy(self->scales, scales, sizeof scales), self->bias = bias;
    self->device = Py_NewRef(device), self->current_stream = Py_NewRef(current_stream);
    return (PyObject*)self;
}

static void product_free(PyObject* of) {
    Product* self = (Product*)of;
    pthread_mutex_destroy(&self->turn);
    Py_XDECREF(self->device), Py_XDECREF(self->current_stream);
    Py_TYPE(of)->tp_free(of);
}

static PyTypeObject ProductType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "lpq_calls.Product",
    .tp_basicsize = sizeof(Product),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = product_new,
    .tp_dealloc = product_free,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Product, call),
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "lpq_calls", .m_size = -1};

PyMODINIT_FUNC PyInit_lpq_calls(void) {
    if (PyType_Ready(&LaunchType) || PyType_Ready(&ProductType)) return NULL;
    PyObject* made = PyModule_Create(&module);
    if (!made) return NULL;
    if (PyModule_AddObjectRef(made, "Launch", (PyObject*)&LaunchType) ||
        PyModule_AddObjectRef(made, "Product", (PyObject*)&ProductType)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
