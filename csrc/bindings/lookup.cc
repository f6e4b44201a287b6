// SPDX-License-Identifier: Apache-2.0
#include "bindings/lookup.h"

#include <algorithm>
#include <array>

namespace kv_offload::bindings {

// The function's `self`. It has its own type (not a capsule), because it takes part in reference cycles
// (manager -> function -> handle_of -> manager) that the garbage collector must traverse.
struct LookupState {
  PyObject_HEAD;
  std::shared_ptr<BoundCache> cache;
  std::array<PyObject*, 4> results;  // indexed by LookupResult
  PyObject* handle_of;
  PyObject* span_of;
  PyObject* part_of;
  PyObject* context;  // the object that `request` belongs to; may be null
  RequestHandle request;
};

namespace {

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<LookupState*>(object);
  Py_VISIT(Py_TYPE(object));
  for (PyObject* result : self->results) Py_VISIT(result);
  Py_VISIT(self->handle_of);
  Py_VISIT(self->span_of);
  Py_VISIT(self->part_of);
  Py_VISIT(self->context);
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<LookupState*>(object);
  for (PyObject*& result : self->results) Py_CLEAR(result);
  Py_CLEAR(self->handle_of);
  Py_CLEAR(self->span_of);
  Py_CLEAR(self->part_of);
  Py_CLEAR(self->context);
  return 0;
}

void dealloc(PyObject* object) {
  auto* self = reinterpret_cast<LookupState*>(object);
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  std::erase(self->cache->lookups, self);
  clear(object);
  std::destroy_at(&self->cache);
  type->tp_free(object);
  Py_DECREF(type);
}

// One type per process, created on first use and never destroyed; the GIL guards it.
PyTypeObject* state_type() {
  static PyObject* type = [] {
    static std::array<PyType_Slot, 4> slots = {{{Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
                                                {Py_tp_clear, reinterpret_cast<void*>(&clear)},
                                                {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
                                                {0, nullptr}}};
    static PyType_Spec spec = {"kv_offload._core._LookupState", sizeof(LookupState), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                               slots.data()};
    return PyType_FromSpec(&spec);
  }();
  if (type == nullptr) throw py::error_already_set();
  return reinterpret_cast<PyTypeObject*>(type);
}

// Returns false with a Python error set.
bool learn_span(LookupState* self, PyObject* context, PyObject* key, RequestHandle request) {
  PyObject* const args[] = {context, key};
  PyObject* answer = PyObject_Vectorcall(self->span_of, args, 2, nullptr);
  if (answer == nullptr) return false;
  const py::object span = py::reinterpret_steal<py::object>(answer);
  if (span.is_none()) return true;
  unsigned int first_end = 0, last_end = 0;
  if (!PyArg_ParseTuple(answer, "II", &first_end, &last_end)) return false;
  self->cache->cache->set_span(request, first_end, last_end);
  return true;
}

// Calls handle_of and stores its result. Returns false with a Python error set; throws when the result is not
// a valid handle. `*request` is the result even if dropping the old context runs Python code that looks up
// with another context.
bool remember(LookupState* self, PyObject* context, PyObject* key, RequestHandle* request) {
  PyObject* answer = PyObject_CallOneArg(self->handle_of, context);
  if (answer == nullptr) return false;
  const unsigned long long handle = PyLong_AsUnsignedLongLong(answer);
  Py_DECREF(answer);
  if (PyErr_Occurred() != nullptr) return false;
  *request = self->request = self->cache->check_handle(handle);
  Py_INCREF(context);
  Py_XSETREF(self->context, context);
  return self->span_of == Py_None || self->cache->cache->has_span(*request) ||
         learn_span(self, context, key, *request);
}

// *tokens: the length of the partial chunk that the key stands for, 0 for a whole chunk. Returns false with a
// Python error set.
bool read_part_tokens(LookupState* self, PyObject* context, PyObject* key, std::uint32_t* tokens) {
  if (self->part_of == Py_None) return true;
  PyObject* const args[] = {context, key};
  PyObject* answer = PyObject_Vectorcall(self->part_of, args, 2, nullptr);
  if (answer == nullptr) return false;
  *tokens = static_cast<std::uint32_t>(PyLong_AsUnsignedLong(answer));
  Py_DECREF(answer);
  return PyErr_Occurred() == nullptr;
}

PyObject* lookup(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  auto* self = reinterpret_cast<LookupState*>(object);
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "lookup(key, context) takes 2 arguments, %zd were given", count);
    return nullptr;
  }
  PyObject* key = args[0];
  if (!PyBytes_Check(key)) {
    PyErr_Format(PyExc_TypeError, "a key must be bytes, not %s", Py_TYPE(key)->tp_name);
    return nullptr;
  }
  const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(key));
  if (!ChunkKey::fits(size)) {
    PyErr_Format(PyExc_ValueError, "a key of %zu bytes: keys have %zu to %zu", size, ChunkKey::kMinBytes,
                 ChunkKey::kMaxBytes);
    return nullptr;
  }
  try {
    RequestHandle request = self->request;
    if (args[1] != self->context && !remember(self, args[1], key, &request)) return nullptr;
    std::uint32_t part = 0;
    if (!read_part_tokens(self, args[1], key, &part)) return nullptr;
    const LookupResult result =
        self->cache->cache->lookup(request, ChunkKey::unchecked(PyBytes_AS_STRING(key), size), part);
    PyObject* answer = self->results[static_cast<std::size_t>(result)];
    Py_INCREF(answer);
    return answer;
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef lookup_method = {"lookup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&lookup)),
                             METH_FASTCALL,
                             "lookup(key, context) -> one of the four results given to make_lookup"};

}  // namespace

py::object make_lookup(std::shared_ptr<BoundCache> cache, const py::tuple& results, py::object handle_of,
                       py::object span_of, py::object part_of) {
  if (results.size() != 4) {
    throw py::type_error("results must be four objects: miss, hit, pending, retry");
  }
  PyTypeObject* type = state_type();
  auto* self = reinterpret_cast<LookupState*>(type->tp_alloc(type, 0));
  if (self == nullptr) throw py::error_already_set();
  std::construct_at(&self->cache, std::move(cache));
  for (std::size_t i = 0; i < 4; ++i) self->results[i] = Py_NewRef(PyTuple_GET_ITEM(results.ptr(), i));
  self->handle_of = handle_of.release().ptr();
  self->span_of = span_of.release().ptr();
  self->part_of = part_of.release().ptr();
  const auto state = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
  self->cache->lookups.push_back(self);
  PyObject* function = PyCFunction_NewEx(&lookup_method, state.ptr(), nullptr);
  if (function == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(function);
}

void forget_context(BoundCache& cache) {
  // Dropping an object may run Python code that makes or drops lookup functions.
  std::vector<py::object> dropped;
  for (LookupState* state : cache.lookups) {
    dropped.push_back(py::reinterpret_steal<py::object>(std::exchange(state->context, nullptr)));
  }
}

}  // namespace kv_offload::bindings
