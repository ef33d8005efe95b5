// Detects the instruction sets of this processor, and holds the one in use.
#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <atomic>
#include <cstring>
#include <string>

#include "ostinato_native.h"

namespace {

#if defined(__x86_64__)

// Tiles keep 8 KiB per thread, so Linux wants to be asked before it saves them (kernel 5.16).
bool kernel_grants_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_tiles() {
#if defined(OST_EMULATE_AMX)
  return true;
#endif
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & (1u << 22)) && (d & (1u << 24)) && kernel_grants_tiles();
}

int32_t find_best() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vnni");  // no processor has one alone
  if (bf16 && has_tiles()) return OST_AMX;
  return bf16 ? OST_AVX512_BF16 : avx512 ? OST_AVX512 : avx2 ? OST_AVX2 : OST_GENERIC;
}

std::string find_vendor() {
  unsigned a = 0, words[3] = {};
  __get_cpuid(0, &a, &words[0], &words[2], &words[1]);
  return std::string(reinterpret_cast<const char *>(words), sizeof words);
}
#elif defined(__aarch64__)

#if defined(__APPLE__)
bool has(const char *feature) {
  int32_t value = 0;
  size_t size = sizeof value;
  return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }
bool has_bf16() { return has("hw.optional.arm.FEAT_BF16"); }
#else
// Bits of the auxiliary vector, see Linux's arch/arm64/include/uapi/asm/hwcap.h.
bool has_dotprod() { return getauxval(AT_HWCAP) & (1ul << 20); }
bool has_i8mm() { return getauxval(AT_HWCAP2) & (1ul << 13); }
bool has_bf16() { return getauxval(AT_HWCAP2) & (1ul << 14); }
#endif

int32_t find_best() {
  if (!has_dotprod()) return OST_NEON;
  if (!has_i8mm()) return OST_NEON_DOTPROD;
  return has_bf16() ? OST_NEON_BF16 : OST_NEON_I8MM;
}
std::string find_vendor() { return ""; }
#else
int32_t find_best() { return OST_GENERIC; }
std::string find_vendor() { return ""; }
#endif

std::atomic<int32_t> &in_use() {
  static std::atomic<int32_t> isa{ost_best_isa()};
  return isa;
}

std::atomic<bool> &is_chosen() {
  static std::atomic<bool> chosen{false};
  return chosen;
}

}  // namespace

extern "C" {

int32_t ost_abi_version(void) { return OST_ABI_VERSION; }

int32_t ost_best_isa(void) {
  static const int32_t best = find_best();
  return best;
}

int32_t ost_current_isa(void) { return in_use(); }

// VDPBF16PS multiplies two pairs where a multiply-add of floats multiplies one. AMD's Zen 4 and 5 start
// one per cycle. Intel's take it apart: 95 GFLOP/s where plain AVX-512, which widens what it reads,
// has 125 beside it (a Xeon with AMX, held to either), so an Intel without AMX, such as Cooper Lake, is
// better off without. By vendor and not by measuring: a busy moment at the start must not decide how
// results are rounded. Products of a few rows wait for memory, and take it wherever it is.
int32_t ost_attention_isa_of(int32_t best, const char *vendor) {
  const bool is_slow = best == OST_AVX512_BF16 && std::strcmp(vendor, "GenuineIntel") == 0;
  return is_slow ? static_cast<int32_t>(OST_AVX512) : best;
}

int32_t ost_attention_isa(void) {
  static const int32_t preferred = ost_attention_isa_of(ost_best_isa(), find_vendor().c_str());
  return is_chosen() ? ost_current_isa() : preferred;
}

int32_t ost_use_isa(int32_t isa) {
  if (isa < OST_GENERIC || isa > ost_best_isa()) return -1;
  is_chosen() = true;
  return in_use() = isa;
}
}
