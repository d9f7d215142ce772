#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The tests of the Python package, against a wheel that is built and installed as users have it: first in an environment
# with nothing else, then beside NumPy, JAX, PyTorch and transformers. scripts/test.sh runs it as one of its stages.
#
#   scripts/test_python.sh [--without-torch] [PYTEST-ARGUMENT...]
#   scripts/test_python.sh [--without-torch] --packages
#
# --without-torch: without PyTorch (some gigabytes) and the tests that need it, which are then skipped and say so.
# --packages: installs the packages and ends. test.sh does that beside its first builds, since it is mostly a download.
# Packages of PyPI are kept in TESSERA_PYTHON_PACKAGES, by default under ~/.cache/tessera: installed once for every list of
# requirements, since that takes minutes. Results: build-python/ctest.xml, for tools/test_summary.py.
# shellcheck source=scripts/setup.sh
source "$(dirname "$0")/setup.sh"

TORCH=yes
if [[ ${1:-} == --without-torch ]]; then TORCH= ; shift; fi

# python3-dev: what torch.compile compiles for a CPU includes Python.h.
need "${BUILD_PACKAGES[@]}" python3 python3-venv ${TORCH:+python3-dev}
lists=(python/tests/requirements.txt)
wheel_options=(--without-cuda)
if [[ -n $TORCH ]]; then lists+=(python/tests/requirements-torch.txt)
else wheel_options+=(--without-torch); echo "without PyTorch: its tests are skipped"
fi
version=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
key=$version-$(cat "${lists[@]}" | sha256sum | cut -c1-12)
packages=${TESSERA_PYTHON_PACKAGES:-${XDG_CACHE_HOME:-$HOME/.cache}/tessera/packages-$key}

# Installs the packages, unless they are there. One process at a time: others wait.
install_packages() {
    mkdir -p "$(dirname "$packages")"
    exec 9>"$packages.lock"
    flock 9
    if [[ ! -f $packages/complete ]]; then
        say "Python: packages, once, into $packages"
        rm -rf "$packages"
        python3 -m venv "$packages"
        "$packages/bin/python" -m pip install -q --disable-pip-version-check "${lists[@]/#/--requirement=}" ||
            die "could not install the packages of ${lists[*]}; is there a network?"
        touch "$packages/complete"
        echo "$SECONDS s"
    fi
    # The type checkers are small and change nothing else, so they do not renew the environment.
    local types=python/tests/requirements-types.txt
    if ! cmp -s "$types" "$packages/types"; then
        if "$packages/bin/python" -m pip install -q --disable-pip-version-check -r "$types"; then cp "$types" "$packages/types"
        else echo "could not install the packages of $types: its tests are skipped"
        fi
    fi
    exec 9>&-
}
install_packages
[[ ${1:-} != --packages ]] || exit 0

rm -f build-python/ctest.xml  # nobody is to take the results of another run for those of this one
rm -rf build-python/dist build-python/installed
TESSERA_WERROR=ON scripts/wheel.sh "${wheel_options[@]}" --venv "$packages" -o build-python/dist

# Nothing but the wheel: no pip, no NumPy.
say "Python: the wheel alone"
python3 -m venv --without-pip build-python/installed
"$packages/bin/python" -m pip --disable-pip-version-check -q --python build-python/installed/bin/python install --no-index \
    --no-deps build-python/dist/*.whl
cd build-python  # away from the sources
env -i PATH="$PWD/installed/bin:$PATH" HOME="$HOME" COLUMNS=80 installed/bin/python -m tessera doctor
env -i PATH="$PATH" installed/bin/tessera --version

say "Python: tests"
site=$(installed/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
"$packages/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))' >"$site/packages.pth"
# In several processes: a test that compiles or trains leaves a core idle. Each process takes some 2 GB.
processes=$((JOBS < 4 ? JOBS : 4))
installed/bin/python -m pytest -n "$processes" --dist worksteal -rs --junitxml ctest.xml -c ../pyproject.toml --rootdir .. ../python/tests "$@"
echo "$SECONDS s in all"
