// What becomes of a daemon thread that is in a call when the interpreter ends.
//
// Until Python 3.13, taking the GIL then unwinds the thread's stack (pthread_exit). That would end
// the process at the first noexcept frame, and would drop Python objects without the GIL. The GIL
// is lost in many places: in WithoutGil, in NumPy's casts, wherever Python code runs. So the thread
// sleeps instead at the first frame of this module that is unwound, until the process ends, as in
// Python 3.14.
#include <unistd.h>
#include <unwind.h>

extern "C" {

_Unwind_Reason_Code __real___gxx_personality_v0(int version, _Unwind_Action actions,
                                                _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception,
                                                _Unwind_Context* context);

// The linker has frames of this module call this one (--wrap, in CMakeLists.txt). Exceptions do as
// before.
_Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions,
                                                _Unwind_Exception_Class exception_class,
                                                _Unwind_Exception* exception,
                                                _Unwind_Context* context) {
  while ((actions & _UA_FORCE_UNWIND) != 0) pause();
  return __real___gxx_personality_v0(version, actions, exception_class, exception, context);
}

}  // extern "C"
