// The op library's interface for the Python bindings: plain C++17 data and functions, so that
// the two may differ in compiler, language standard and linked libraries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flatweights {

// Raised with every change of the declarations below; libraries of another version are not used.
inline constexpr std::uint32_t kVariablesApiVersion = 7;

// The exported function, `const VariablesApi*()`.
inline constexpr char kVariablesApiSymbol[] = "flatweights_variables_api";

class Variables;        // variables that have been bound
class LockedVariables;  // some of them, during one gather or scatter

// A variable to bind.
struct WantedVariable {
  std::int64_t id;  // what the op FlatweightsBindVariable returned
  int dtype;        // tensorflow::DataType
  int rank;
  const std::int64_t* dims;
};

enum class VariableAccess {
  kRead,
  kOverwrite,  // the old values may be lost
  kUpdate,
};

// The address of a locked variable's elements.
struct VariableMemory {
  void* data;          // null where there is nothing to move
  const void* before;  // the value, to be copied to `data` before it is updated; else null
  void* stream;        // CUDA's, in the order of which a GPU's memory is used; null on the host
};

enum class VariableTrouble {
  kNone,
  kGone,           // destroyed: to be bound again
  kUninitialized,  // exists, has no value
  kNoMemory,       // none for a new value
  kOther,          // another dtype or shape; see `text`
};

struct VariableFailure {
  VariableTrouble trouble;
  std::size_t index;  // of the variable
  char text[256];     // the actual value, such as "float64 (64,)"
};

// Memory that variables may alias instead of copying it.
struct VariableAlias {
  const void* const* data;       // for each variable; null where it is to be copied
  void* owner;                   // keeps all of `data` alive
  void (*release)(void* owner);  // called once, on any thread, when none aliases it
  void (*linger)();              // called, on any thread, when only `sweep` can find that out
};

// A tensor that a Python function reads, and the one that it writes: maybe the same memory.
struct CalledTensor {
  const void* input;
  void* output;
  std::size_t size;  // elements of each
  void* stream;      // CUDA's, in the order of which a GPU's memory is used; null on the host
};

// Calls the function with this id, from any thread. Returns false with the reason in `text`, which
// has room for `room` characters.
using PythonCaller = bool (*)(std::int64_t id, const CalledTensor* tensors, std::size_t count,
                              char* text, std::size_t room);

// Begins what the function with this id would do, if that needs no Python, and waits a moment.
// kNot: nothing was done. kBegun: the `PythonCaller` has to go on, with the same array of tensors,
// and may wait for long.
enum class StepStart { kNot, kDone, kBegun };
using StepStarter = StepStart (*)(std::int64_t id, const CalledTensor* tensors, std::size_t count);

struct VariablesApi {
  std::uint32_t version;

  // Part of the op's result: an id means nothing in another process.
  std::int64_t nonce;

  // Binds variables, consuming their ids; null after a failure.
  Variables* (*make)(const WantedVariable* wanted, std::size_t count, VariableFailure* failure);
  void (*destroy)(Variables* variables);

  // Makes the processor prefetch the memory that the next lock and the moves after it will read.
  // It changes nothing and may be called at any time.
  void (*prefetch)(const Variables* variables);

  // Locks the variables at the `count` positions `chosen` (all if that is null), checks that each
  // still has the dtype and shape that it was bound with, and writes its address to `memory`, which
  // has an entry for every bound variable. Null after a failure: then nothing is locked and nothing
  // has changed.
  //
  // For writing, nothing else sees the memory: where the value is visible elsewhere, the address is
  // that of a new buffer, which becomes the variable's when `unlock` commits. With `alias`,
  // variables alias the given memory, except those that TensorFlow writes to in place. The owner is
  // released in any case, after a failure at once.
  LockedVariables* (*lock)(Variables* variables, VariableAccess access, const std::size_t* chosen,
                           std::size_t count, const VariableAlias* alias, VariableMemory* memory,
                           VariableFailure* failure);
  void (*unlock)(LockedVariables* locked, bool commit);

  // Writes to `aliased`, for each variable, whether its value is memory that it was given to
  // alias.
  void (*find_aliased)(Variables* variables, bool* aliased);

  // Releases the owners of memory that was aliased last by slices of former values, once no slice
  // is left. Returns whether slices still keep other owners. From any thread, at any time.
  bool (*sweep)();

  // Whether operations that this thread dispatches run asynchronously; `context`: a TFE_Context.
  // Null if this TensorFlow does not expose it.
  bool (*is_async)(void* context);

  // The address of this thread's `is_eager` in `context`, TensorFlow's Python object: the value
  // that reading the attribute gives, without the cost of Python and pybind11. Call it, and read
  // the value at once, with the GIL held. Null if this TensorFlow does not expose it.
  const bool* (*eager_mode)(void* context);

  // Sets the functions that the op FlatweightsCallPython calls.
  void (*set_python_caller)(StepStarter starter, PythonCaller caller);
};

}  // namespace flatweights
