#!/bin/sh
# Takes out of the installed packages what nothing loads at run time: about 0.7 GB.
# usage: trim.sh SITE_PACKAGES CUDA
set -eu
cd "$1"
version=$(echo "$2" | tr -d .)

find . -name '*.a' -delete                          # static libraries
find . -type d -name tests -prune -exec rm -r {} +  # the packages' own tests
rm -r triton/backends/nvidia/lib/cupti              # libraries of Triton's profiler; torch brings its own
rm nvidia/*/lib/libnvrtc*.alt.so.*                  # a second build of NVRTC, which torch does not name
rm nvidia/*/lib/libcusolverMg.so.*                  # linear algebra over several GPUs, which torch does not link
find bitsandbytes -name 'libbitsandbytes_*' ! -name "*_cuda$version.so" ! -name '*_cpu.so' -delete
test -f "bitsandbytes/libbitsandbytes_cuda$version.so"
