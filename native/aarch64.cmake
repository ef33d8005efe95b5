# Debian's cross compiler for 64-bit ARM, and its emulator:
#   CMAKE_TOOLCHAIN_FILE=$PWD/native/aarch64.cmake pip wheel --no-deps .
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
