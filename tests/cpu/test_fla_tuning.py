"""FLA reads its kernels' configurations from our folder, unless a user has told it where to look."""

import json
import sys
from enum import Enum
from types import ModuleType

import pytest

from glm5_next.plugins.kernels import fla_tuning


class Mode(Enum):
    DISABLED = "disabled"
    DEFAULT = "default"


@pytest.fixture
def cache(monkeypatch) -> ModuleType:
    """FLA's module, imported before with tuning on."""
    module = ModuleType("fla.ops.utils.cache")
    module.FlaCacheMode, module.FLA_CACHE_MODE = Mode, Mode.DISABLED
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("FLA_CONFIG_DIR", "")  # so that both are put back
    monkeypatch.setenv(fla_tuning.MODE, "disabled")
    return module


def test_a_users_choice_is_left_alone(cache):
    assert not fla_tuning.use_tuned_configurations()
    assert cache.FLA_CACHE_MODE is Mode.DISABLED


def test_otherwise_fla_takes_one_configuration_a_kernel_from_our_folder(cache, monkeypatch):
    monkeypatch.delenv(fla_tuning.MODE)
    assert fla_tuning.use_tuned_configurations()
    assert cache.FLA_CACHE_MODE is Mode.DEFAULT
    assert fla_tuning.os.environ["FLA_CONFIG_DIR"] == str(fla_tuning.FOLDER)


def test_every_file_is_one_that_fla_can_read():
    files = sorted(fla_tuning.FOLDER.glob("*.json"))
    assert len(files) >= 19
    for path in files:
        content = json.loads(path.read_text())
        config = content["default_config"]
        assert content["kernel_name"] == path.stem
        assert isinstance(config["kwargs"], dict) and config["num_ctas"] == 1
        assert config["num_warps"] in (1, 2, 4, 8, 16) and config["num_stages"] in (1, 2, 3, 4)
