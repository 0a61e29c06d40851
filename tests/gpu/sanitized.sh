#!/usr/bin/env bash
# Every CUDA kernel of every format under compute-sanitizer, on small matrices of odd shapes: accesses out of bounds
# (memcheck), races in shared memory (racecheck), barriers (synccheck), and reads of what nobody wrote (initcheck).
#
# The checks run side by side. It needs a GPU, lpq[cuda], and compute-sanitizer of the CUDA toolkit; arguments go to
# pytest. PYTHON and SANITIZER name other programs.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
sanitizer=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # so that every tensor has bounds of its own
export LPQ_KERNELS=cuda,torch,reference OMP_NUM_THREADS=1
logs=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$logs"' EXIT

skip=() # PyTorch's own kernels take the most time; initcheck must see them, as they write what ours read
case $("$sanitizer" --help) in *--kernel-regex-exclude*) skip=(--kernel-regex-exclude kns=at6native) ;; esac

declare -A named
check() { # tool, name, tests
    local tool=$1 name=$2 tests
    read -ra tests <<<"$3"
    shift 3
    "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 20 "$@" \
        "$python" -m pytest -q -x -p no:cacheprovider "${tests[@]}" "${arguments[@]}" >"$logs/$tool $name" 2>&1 &
    named[$!]="$tool $name"
}

arguments=("$@")
kit=tests/testing/test_builtins.py::test_kernels_equal_the_reference
for format in fp8 mxfp8 nvfp4; do
    # cuda-core asks the driver for what some drivers lack: such a call's error is no kernel's.
    check memcheck "$format" "${kit}[$format-cuda]" --report-api-errors no "${skip[@]}"
    for tool in racecheck synccheck; do
        check "$tool" "$format" "${kit}[$format-cuda]" "${skip[@]}"
    done
done
large=tests/gpu/test_kernels.py::test_small_matrices_in_the_way_of_large_ones
exact="tests/gpu/test_multiplicands.py::test_they_are_the_exact_forms_of_encoded_operands -k bfloat16"
factor=tests/gpu/test_gemms.py::test_what_cannot_be_represented_in_bf16_before_its_factor_can_be_after
graphs=tests/gpu/test_casting.py::test_a_graph_casts_what_the_masters_hold_at_its_replay[mxfp8]
for name in large exact factor graphs; do
    [ "$name" != graphs ] || unset PYTORCH_NO_CUDA_MEMORY_CACHING # no memory may be asked for while one is recorded
    check memcheck "$name" "${!name}" --report-api-errors no "${skip[@]}"
    for tool in racecheck synccheck; do
        [ "$tool $name" != "racecheck factor" ] || continue # it reports cuBLAS's kernels, of split contractions
        check "$tool" "$name" "${!name}" "${skip[@]}"
    done
done
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
check memcheck blocks "tests/gpu/test_gemms.py::test_products -k block" --report-api-errors no "${skip[@]}" # cuBLAS's kernels
check initcheck formats "tests/gpu/test_reference_on_gpu.py::test_bytes_are_those_of_the_cpu -k kernels"

failed=0
for _ in "${!named[@]}"; do # each as soon as it ends
    status=0
    wait -n -p ended || status=$?
    name=${named[$ended]}
    if [ "$status" = 0 ] && grep -q ' passed' "$logs/$name"; then # a test that is skipped shows nothing
        echo "$name: $(grep -hoE 'SUMMARY: .*|[0-9]+ passed.*' "$logs/$name" | paste -sd ';')"
    else
        failed=1
        printf '%s: FAILED\n' "$name"
        grep -v 'Host Frame' "$logs/$name" | tail -n 60
    fi
done
exit "$failed"
