"""Drift: every function of TabPFN that the package relies on is watched, and one error names all that differ."""

import hashlib
import importlib
import inspect
import pkgutil

import pytest

from oretrofit import TabPFNDriftError, patches
from oretrofit.patches.architectures import HOST_SPECS
from oretrofit.retrofit import tabpfn_api
from oretrofit.retrofit.patcher import carriers, patch_model

OF_HOSTS = {name: fingerprint for spec in HOST_SPECS for name, fingerprint in spec.sources.items()}
KNOWN = tabpfn_api.SOURCES | OF_HOSTS


def place(name):
    """The module or class that has a function, and its name there."""
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute


def another(*args, **kwargs):
    raise AssertionError("runs in no test")


def patched(host):
    """A copy of the host's model with the variant `oa`, and what tells whether it was touched since."""
    model = host.specs.model
    patch_model(model, "oa", dict.fromkeys(carriers(model, "oa"), 1e-3))
    return model, lambda: [(type(module), vars(module).get("tau")) for module in model.modules()]


def patch_closed(model):
    patch_model(model, "closed", dict.fromkeys(carriers(model, "closed"), 1e-3))


def test_the_installed_tabpfn_is_the_known_one():
    assert tabpfn_api.drift() == {}
    tabpfn_api.check_tabpfn()


def test_no_two_functions_have_one_fingerprint():
    """As they would if it were of their class or module."""
    assert len({*KNOWN.values()}) == len(KNOWN)


@pytest.mark.parametrize("name", KNOWN)
def test_another_function_is_named(monkeypatch, name):
    monkeypatch.setattr(*place(name), another)
    found = tabpfn_api.drift()
    assert list(found) == [name]
    expected, now = found[name]
    source = "".join(inspect.getsourcelines(another)[0])
    assert (expected, now) == (KNOWN[name], hashlib.sha256(source.encode()).hexdigest()[:12])
    with pytest.raises(TabPFNDriftError, match=name.replace(".", r"\.")):
        tabpfn_api.check_tabpfn()


@pytest.mark.parametrize("name", KNOWN)
def test_a_function_that_is_gone_is_named(monkeypatch, name):
    owner, attribute = place(name)
    monkeypatch.delattr(owner, attribute)
    inherited = inspect.isclass(owner) and hasattr(owner, attribute)  # as of `nn.RMSNorm`
    expected, now = tabpfn_api.drift()[name]
    assert expected == KNOWN[name] != now
    assert (now == "missing") != inherited


def test_a_module_that_is_gone(monkeypatch):
    monkeypatch.setitem(tabpfn_api.SOURCES, "tabpfn.no_such_module:forward", "0" * 12)
    assert tabpfn_api.drift() == {"tabpfn.no_such_module:forward": ("0" * 12, "missing")}


def test_one_error_names_all_before_anything_is_patched(monkeypatch, tiny_host):
    model, state = patched(tiny_host)
    before = state()
    for name in KNOWN:
        monkeypatch.setattr(*place(name), another)
    with pytest.raises(TabPFNDriftError) as raised:
        patch_closed(model)
    named = [line.split()[0] for line in str(raised.value).splitlines() if line.startswith("  ")]
    assert sorted(named) == sorted(KNOWN)
    assert state() == before
    monkeypatch.undo()
    patch_closed(model)
    assert state() != before


def overridden():
    """The functions of TabPFN that a class of `patches` has its own instead of."""
    for info in pkgutil.iter_modules(patches.__path__, f"{patches.__name__}."):
        module = importlib.import_module(info.name)
        for o_class in vars(module).values():
            if not (inspect.isclass(o_class) and o_class.__module__ == info.name):
                continue
            for name, value in vars(o_class).items():
                function = getattr(value, "__func__", value)  # of a class method
                # What a dataclass writes for itself is in no file.
                if not inspect.isfunction(function) or function.__code__.co_filename != module.__file__:
                    continue
                for base in o_class.__mro__[1:]:
                    if base.__module__.startswith("tabpfn.") and name in vars(base):
                        yield f"{base.__module__}:{base.__qualname__}.{name}"
                        break


def test_every_function_that_is_overridden_is_watched():
    found = {*overridden()}
    assert "tabpfn.architectures.tabpfn_v3:TabPFNV3.forward" in found
    assert "tabpfn.architectures.kv_cache:KVCacheEntry.to" in found
    assert found <= OF_HOSTS.keys()
