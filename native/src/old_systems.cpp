// What keeps the library loadable on systems older than the one it was built on.
#include <cstdlib>  // which says whose library this is

#if defined(__GLIBCXX__)
namespace std {

// Called by containers where a size overflows. libstdc++ has it from GCC 11 on (GLIBCXX_3.4.29), newer
// than what torch needs; containers here never grow so large.
void __throw_bad_array_new_length() { std::abort(); }

}  // namespace std
#endif
