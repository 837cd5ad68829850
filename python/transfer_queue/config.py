"""The configuration of a session: packaged defaults, the user's on top, checked where it is known.

Keys that nobody here knows pass through untouched, because programs hand over sections that also serve others. A key
that is known and wrong is refused with its full name, before anything starts.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue._environment import MOST_SECONDS
from transfer_queue._whole_numbers import MOST

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["defaults", "load"]

_CHOICE = "storage_backend"
_MISSING = "???"  # how OmegaConf writes a value that is still to be given

# Returns the value to store, or raises ValueError with what is wanted.
_Check = Callable[[Any], Any]


@cache
def _packaged() -> str:
    return (resources.files("transfer_queue") / "config.yaml").read_text(encoding="utf-8")


def defaults() -> dict[str, Any]:
    """The packaged defaults, as a new dict."""
    import yaml

    # The loader in C takes a tenth of the time; not every build of the package has it.
    conf: dict[str, Any] = yaml.load(_packaged(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return conf


def load(conf: Any = None) -> DictConfig:
    """Lays a configuration over the defaults and checks it.

    Args:
        conf: dict, OmegaConf config, dataclass, or nothing. It is not modified. Interpolations see the whole result,
            or, in a section of a larger config, that config.

    Returns:
        A config that may hold objects, such as a sampler, and pickles when they do.

    Raises:
        ValueError: a known key has a wrong value, and the text has the dotted key, the value and what is wanted; or the
            sections of the backends contradict each other.

    Example:
        >>> load({"client": {"layout": "dense"}}).client.layout
        'dense'
    """
    # Loaded late: it costs more time than the rest of the package without torch.
    from omegaconf import OmegaConf

    given = _mapping_of(conf)
    merged = _merge(defaults(), given, "")
    _check_sections(given.get("backend"), merged["backend"])
    out: DictConfig = OmegaConf.create(_guarded(merged), flags={"allow_objects": True})
    _check(out)
    return out


def _mapping_of(conf: Any) -> Mapping[str, Any]:
    """The user's configuration as nested dicts, with interpolations resolved where only the original can."""
    from omegaconf import DictConfig, OmegaConf

    if conf is None:
        return {}
    if dataclasses.is_dataclass(conf):
        conf = OmegaConf.structured(conf)
    if isinstance(conf, DictConfig):
        if conf._is_none() or not len(conf):
            return {}
        parent = conf._get_parent() is not None
        return _resolved(conf) if parent else _container(conf)
    if isinstance(conf, Mapping):
        return conf
    if not conf:
        return {}
    raise ValueError(f"config: got a value of type {type(conf).__name__}, want a mapping")


def _container(conf: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(conf, resolve=False)


def _resolved(conf: Any) -> dict[str, Any]:
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    out: dict[str, Any] = {}
    for key in conf:
        if OmegaConf.is_missing(conf, key):
            continue
        try:
            value = conf[key]
        except OmegaConfBaseException:
            # Somebody else's key may refer to what is not there yet.
            value = conf._get_node(key)._value()
        if isinstance(value, DictConfig):
            value = _resolved(value)
        elif isinstance(value, ListConfig):
            value = _container(value)
        out[key] = value
    return out


def _merge(base: dict[str, Any], over: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """``over`` on top of ``base``. A section that is given as null is as good as not given."""
    out = dict(base)
    for key, value in over.items():
        known = out.get(key)
        if _is_config(value):
            value = _resolved(value) if hasattr(value, "items") else _container(value)
        if isinstance(value, str) and value == _MISSING:
            continue
        if isinstance(known, dict):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise _wrong(f"{prefix}{key}", value, "a mapping")
            out[key] = _merge(known, value, f"{prefix}{key}.")
        else:
            out[key] = value
    return out


def _is_config(value: Any) -> bool:
    from omegaconf import OmegaConf

    return bool(OmegaConf.is_config(value))


def _guarded(value: Any) -> Any:
    """Wraps objects that OmegaConf would turn into configs of its own, as a sampler that is a dataclass, or refuse."""
    from omegaconf import AnyNode

    if isinstance(value, Mapping):
        return {key: _guarded(inner) for key, inner in value.items()}
    if isinstance(value, type) or dataclasses.is_dataclass(value) or hasattr(value, "__attrs_attrs__"):
        return AnyNode(value, flags={"allow_objects": True})
    return value


def _wrong(key: str, got: Any, want: str) -> ValueError:
    return ValueError(f"config: {key}: got {got!r}, want {want}")


def _flag(value: Any) -> Any:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole(least: int, most: int | None = None) -> _Check:
    """A whole number; YAML reads 1e9 as a float, so whole floats count."""
    want = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"

    def check(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least or (most and value > most):
            raise ValueError(want)
        if value > MOST:
            raise ValueError(f"{want} that fits into 64 bits")
        return value

    return check


def _number(want: str, fits: Callable[[float], bool]) -> _Check:
    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise ValueError(want)
        return value

    return check


def _seconds(want: str, fits: Callable[[float], bool]) -> _Check:
    """A number of seconds; a very long time is as good as for ever."""
    check = _number(want, fits)
    return lambda value: min(check(value), MOST_SECONDS)


def _choice(*values: str) -> _Check:
    want = " or ".join(map(repr, values))

    def check(value: Any) -> Any:
        if value not in values:
            raise ValueError(want)
        return value

    return check


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("a str")
    return value


def _name(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        raise ValueError("a name")
    return value


def _namespace(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", value):
        raise ValueError('1 to 64 letters, digits, ".", "_" or "-"')
    return value


def _folder(because: str = "") -> _Check:
    def check(value: Any) -> Any:
        if isinstance(value, Path):
            value = str(value)
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError(f"a directory{because}")
        return value

    return check


def _section(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError("a mapping")
    return value


def _or_null(check: _Check) -> _Check:
    def either(value: Any) -> Any:
        try:
            return None if value is None else check(value)
        except ValueError as want:
            raise ValueError(f"null or {want}") from None

    return either


def _threshold(value: Any) -> Any:
    try:
        return _whole(1)(value)
    except ValueError as want:
        raise ValueError(f"{want} (threshold must be greater than zero)") from None


_share = _number("a number above 0 and at most 1", lambda share: 0 < share <= 1)
_port = _whole(0, 65535)
_journal_folder = _folder(", because controller.journal.durability is not none")

_KNOWN: dict[str, _Check] = {
    "runtime": _choice("auto", "embedded", "attach", "ray"),
    "namespace": _namespace,
    "security": _choice("token", "curve"),
    "remote.listen": _or_null(_name),
    "remote.payload_port": _port,
    "client.timeout_s": _seconds("a number above 0", lambda seconds: seconds > 0),
    "client.layout": _choice("jagged", "dense"),
    "controller.polling_mode": _flag,
    "controller.journal.durability": _choice("none", "relaxed", "strict"),
    "controller.journal.path": _or_null(_folder()),
    "controller.journal.restart_wait_s": _seconds("a number above 0", lambda seconds: seconds > 0),
    "controller.sampler_timeout_s": _seconds("a number above 0", lambda seconds: seconds > 0),
    "metrics.enabled": _flag,
    "metrics.port": _port,
    "metrics.host": _or_null(_name),
    "backend.storage_backend": _name,
}

# Checked for the chosen backend only: a section that is not used may hold anything.
_BACKENDS: dict[str, dict[str, _Check]] = {
    "SimpleStorage": {
        "total_storage_size": _or_null(_whole(1)),
        "num_data_storage_units": _whole(1),
        "required_node_resource": _or_null(_name),
        "memory_limit_bytes": _or_null(_whole(1)),
        "disk_limit_bytes": _or_null(_whole(1)),
        "put_wait_s": _seconds("a number of at least 0", lambda seconds: seconds >= 0),
        "high_watermark": _share,
        "low_watermark": _share,
        "ssd_offload.enabled": _flag,
    },
    "MooncakeStore": {
        "auto_init": _flag,
        "metadata_server": _text,
        "master_server_address": _text,
        "local_hostname": _text,
        "protocol": _name,
        "global_segment_size": _whole(0),
        "local_buffer_size": _whole(0),
        "device_name": _text,
        "hard_pin": _or_null(_flag),
        "use_gdr": _flag,
        "gdr_staging_buffer_mb": _whole(1),
        "offload.enabled": _flag,
        "offload.file_storage_path": _text,
        "offload.local_buffer_size_bytes": _whole(1),
        "offload.use_uring": _flag,
        "offload.heartbeat_interval_seconds": _number("a number above 0", lambda seconds: seconds > 0),
        "offload.client_port": _port,
        "offload.eviction_high_watermark_ratio": _share,
        "offload.eviction_ratio": _share,
    },
    "Yuanrong": {
        "auto_init": _flag,
        "worker_port": _port,
        "metastore_port": _port,
        "enable_yr_npu_transport": _flag,
        "enable_rdma": _flag,
        "ds_max_workers": _whole(1),
        "ucx_env_vars": _section,
        "worker_args": _text,
    },
}

# Looked at only when offloading is on.
_OFFLOAD: dict[str, _Check] = {
    "path": _folder(", because ssd_offload is enabled"),
    "threshold_bytes": _threshold,
    "durability": _choice("none", "relaxed", "strict"),
    "glibc_mmap_threshold_bytes": _or_null(_whole(1)),
}


def _check_sections(given: Any, merged: Mapping[str, Any]) -> None:
    """Refuses what is given for backends when it leaves open, or says wrongly, which one is wanted."""
    if not hasattr(given, "items"):
        return
    known = {name: section for name, section in defaults()["backend"].items() if name != _CHOICE}
    for name in set(merged) - set(known) - {_CHOICE}:
        likely = difflib.get_close_matches(str(name).lower(), [*map(str.lower, known), _CHOICE], n=1, cutoff=0.8)
        if likely:
            meant = next(right for right in [*known, _CHOICE] if right.lower() == likely[0])
            raise ValueError(f"config: backend.{name}: nothing is called so, want {meant!r}")
    if given.get(_CHOICE) not in (None, _MISSING):
        return
    chosen = merged[_CHOICE]
    changed = [name for name, section in known.items() if merged[name] != section]
    if changed and chosen not in changed:
        names = " and ".join(f"backend.{name}" for name in changed)
        raise ValueError(f"config: {names}: given without backend.{_CHOICE}, which is {chosen!r} then; give it too")


def _check(conf: DictConfig) -> None:
    _check_keys(conf, "", _KNOWN)
    if conf.controller.journal.durability != "none":
        _check_keys(conf, "controller.journal.", {"path": _journal_folder})
    name = conf.backend.storage_backend
    section = f"backend.{name}."
    if name not in _BACKENDS:
        return
    _check_keys(conf, section, _BACKENDS[name])
    if name != "SimpleStorage":
        return
    storage = conf.backend.SimpleStorage
    if not storage.low_watermark < storage.high_watermark:
        raise _wrong(
            f"{section}low_watermark", storage.low_watermark, f"less than high_watermark {storage.high_watermark}"
        )
    if storage.ssd_offload.enabled:
        _check_keys(conf, f"{section}ssd_offload.", _OFFLOAD)


def _check_keys(conf: DictConfig, prefix: str, checks: Mapping[str, _Check]) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, check in checks.items():
        key = prefix + name
        try:
            got = OmegaConf.select(conf, key)
        except OmegaConfBaseException as error:
            raise ValueError(f"config: {key}: cannot be resolved: {error}") from error
        try:
            value = check(got)
        except ValueError as want:
            raise _wrong(key, got, str(want)) from None
        if type(value) is not type(got) or value != got:
            OmegaConf.update(conf, key, value)
