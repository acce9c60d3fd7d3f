# Sourced by the other scripts: finds a Python, makes a virtual environment in the project, installs the package in it.
# Needs PATH and, if the machine has them, pip's own settings; nothing else. Uses no administrator rights.

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $1"
  shift
  for line in "$@"; do say "       $line"; done
  exit 1
}

# Every python3.N, N >= 11, that can be found: on PATH, and among pyenv's versions, which its shims on PATH may hide.
python_candidates() {
  local name dir
  [ -z "${PYTHON:-}" ] || printf '%s\n' "$PYTHON"
  for name in python3 python3.11 python3.12 python3.13 python3.14 python; do
    type -aP "$name" 2>/dev/null || true
  done
  local IFS=:
  for dir in $PATH; do
    case "$dir" in
      */shims) ls -d "${dir%/shims}"/versions/3.*/bin/python3 2>/dev/null || true ;;
    esac
  done
}

# What one is good for: prints "MINOR PATH" if it is new enough and can make environments and build extensions.
python_check='
import os, sys, sysconfig
assert sys.version_info[:2] >= (3, 11)
import ensurepip, venv
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
print(sys.version_info[1], sys.executable)
'

# find_python [newest]: the first suitable Python, or the newest.
find_python() {
  local candidate found="" line
  while IFS= read -r candidate; do
    line=$("$candidate" -c "$python_check" 2>/dev/null) || continue
    if [ "${1:-}" != newest ]; then
      printf '%s\n' "${line#* }"
      return
    fi
    found+="$line"$'\n'
  done < <(python_candidates)
  [ -n "$found" ] || die "no suitable Python: version 3.11 or newer is needed, with its venv module and headers" \
    "Debian, Ubuntu: sudo apt-get install python3 python3-venv python3-dev" \
    "Fedora:         sudo dnf install python3 python3-devel" \
    "or set PYTHON to one: PYTHON=/path/to/python3.12 bash $0"
  printf '%s' "$found" | sort -k1,1nr -s | head -n1 | cut -d' ' -f2-
}

need_compiler() {
  command -v "${CC:-gcc}" >/dev/null || command -v cc >/dev/null || die \
    "no C compiler: the I/O engine and the optimizer kernels are built on this machine" \
    "Debian, Ubuntu: sudo apt-get install gcc" \
    "Fedora:         sudo dnf install gcc"
}

# What decides whether an installation is up to date: an editable one sees Python files by itself.
install_key() {
  {
    "$1" -V
    cat pyproject.toml setup.py
    find aio_ffi zinf_jax -type f \( -name '*.[ch]' -o -name _build.py \) ! -name '_*.c' | sort | xargs cat
  } | cksum
}

# make_environment FOLDER EXTRAS [newest]: FOLDER gets a virtual environment with this package, if it has not yet.
make_environment() {
  local folder=$1 extras=$2 which=${3:-} python="$1/bin/python" key
  need_compiler
  if ! "$python" -c 'import pip' >/dev/null 2>&1; then
    local base
    base=$(find_python $which)
    say "making $folder with $base"
    rm -rf "$folder"
    "$base" -m venv "$folder"
  fi
  key=$(install_key "$python")
  local mark="$folder/.installed-${extras//[^a-z]/}"
  if [ "$(cat "$mark" 2>/dev/null)" != "$key" ]; then
    say "installing the package and what it needs in $folder (minutes the first time)"
    local start=$SECONDS
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".$extras" || die "the installation failed" \
      "pip needs a package index; its settings (PIP_INDEX_URL, PIP_FIND_LINKS ...) are used if they are set"
    printf '%s\n' "$key" >"$mark"
    say "installed in $((SECONDS - start)) s"
  fi
}
