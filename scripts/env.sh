# Sourced by the other scripts: makes .venv with this package and its pinned dependencies, and puts it on PATH.
# Needs Python 3.12 or 3.13 and a package index; nothing is compiled.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

is_supported() {
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python; do
        # A pyenv shim is on PATH and fails unless its version is selected: only running it tells.
        if is_supported "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if command -v uv >/dev/null && uv python install 3.12 >/dev/null 2>&1; then
        uv python find 3.12
        return
    fi
    echo "No Python 3.12 or 3.13 found (looked at python3.12, python3.13, python3, python, pyenv and uv)." >&2
    echo "Install one, for example with: apt install python3.12 python3.12-venv, or: pyenv install 3.12" >&2
    return 1
}

install() {
    local wanted python
    wanted=$(cat "$root/pyproject.toml" "$root/constraints.txt" | sha256sum)
    if [ "$(cat "$root/.venv/installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python)
    echo "installing into $root/.venv with $("$python" --version) (about 5 GB, a few minutes) ..."
    "$python" -m venv "$root/.venv" || {
        echo "$python cannot make a virtual environment; on Debian: apt install python3-venv" >&2
        return 1
    }
    "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$root/constraints.txt" --editable "$root[dev]"
    echo "$wanted" >"$root/.venv/installed"
}

install
export PATH="$root/.venv/bin:$PATH"
