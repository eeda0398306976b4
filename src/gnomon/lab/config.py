"""Settings of a study: dataclass fields are the truth, profiles and `-o` override them, an id names the result."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin

import yaml

from gnomon.core.errors import UsageError, unknown
from gnomon.core.files import canonical_json

if TYPE_CHECKING:
    from .engine import Lab

MAX_SEED = 2**32
MOST_THREADS = 1024  # more has no use on any machine and exhausts the system's
STANDARD_PROFILES = ("smoke", "cpu", "full", "gpu")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Base of every study: its fields are the settings, :meth:`run` declares stages, claims and figures."""

    seeds: tuple[int, ...] = (0,)
    """Seeds that verdicts are computed over."""
    threads: int = 1
    """Threads of every compared stage; tiny models are several times faster with one."""
    rivals: tuple[str, ...] = ()
    """Competitors added from outside, each `name=module:factory` (`--with`)."""

    slug: ClassVar[str] = ""
    """The row of `systems.py` this study belongs to; its card holds the claims' texts."""
    profiles: ClassVar[dict[str, dict[str, Any]]] = {}
    """Field overrides by profile name; the field defaults are the profile `cpu`."""
    sources: ClassVar[tuple[str, ...]] = ("model", "data")
    """Fields that may name a file or folder: they enter the run id by name and content, not by path."""
    rival_protocol: ClassVar[str] = ""
    """What a `--with` factory must return; empty = the study compares no interchangeable competitors."""
    disk_bytes: ClassVar[int] = 500_000_000
    """Free space a run asks for before it starts."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise UsageError(f"seeds must be distinct non-negative integers, at least one; got {self.seeds}.")
        if max(self.seeds) >= MAX_SEED:
            raise UsageError(f"seeds must lie below 2**32 (NumPy's limit), got {max(self.seeds)}.")
        if not 1 <= self.threads <= MOST_THREADS:
            raise UsageError(f"threads must be at least 1 and at most {MOST_THREADS}, got {self.threads}.")
        if self.rivals and not self.rival_protocol:
            raise UsageError(
                f"Study {self.slug!r} compares no interchangeable competitors, so --with has no use."
            )
        for rival in self.rivals:
            name, _, target = rival.partition("=")
            if not name or ":" not in target:
                raise UsageError(f"--with takes name=module:factory, got {rival!r}.")

    @property
    def rival_targets(self) -> dict[str, str]:
        """`module:factory` of each added competitor by its name."""
        return dict(rival.split("=", 1) for rival in self.rivals)

    def check(self) -> None:
        """Refuse what can't work (model missing, data too short) before any expensive work.

        The base requires all of `models`; a study adds its own and calls `super().check()`.
        """
        for model in self.models:
            from gnomon.core.models import require

            require(model)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models whose answers or weights the records describe."""
        model = getattr(self, "model", None)
        return (model,) if model else ()

    def run(self, lab: Lab) -> None:
        """Declare stages, claims and figures."""
        raise TypeError(f"{type(self).__name__} does not define run(self, lab).")

    @classmethod
    def profile_names(cls) -> tuple[str, ...]:
        """The standard profiles this study has, then its own."""
        names = {"cpu", *cls.profiles}
        return tuple(p for p in STANDARD_PROFILES if p in names) + tuple(
            sorted(names - set(STANDARD_PROFILES))
        )

    @classmethod
    def resolve(cls, profile: str = "cpu", overrides: Mapping[str, Any] | None = None) -> Self:
        """Build the settings: defaults, then the profile's overrides, then the user's.

        Args:
            overrides: values of the field's type, or the strings of `-o field=value`.

        Raises:
            UsageError: for an unknown profile or field (the nearest is offered) or a value of the wrong type.
        """
        if profile not in cls.profile_names():
            raise unknown("profile", profile, cls.profile_names())
        hints = typing.get_type_hints(cls)
        fields = {field.name for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for name, value in {**cls.profiles.get(profile, {}), **(overrides or {})}.items():
            if name not in fields:
                raise unknown(f"setting of study {cls.slug or cls.__name__!r}:", name, fields)
            values[name] = coerce(value, hints[name], name)
        return cls(**values)

    def settings(self) -> dict[str, Any]:
        """All fields as JSON values, paths as given."""
        return {field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def portable(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Settings in the form that ids, records and results hold, and the map from real to portable strings."""
        from gnomon.core.refs import portable

        settings, mapping = self.settings(), dict[str, str]()
        for name in self.sources:
            if settings.get(name) is None:
                continue
            many = isinstance(settings[name], list)
            values = settings[name] if many else [settings[name]]
            for value in values:
                mapping[value] = portable(value)
            settings[name] = [mapping[v] for v in values] if many else mapping[values[0]]
        return settings, mapping


def run_id(slug: str, profile: str, portable_settings: Mapping[str, Any]) -> str:
    """Twelve hex digits that name a run: equal settings (by content, not by path) give equal ids."""
    text = canonical_json({"slug": slug, "profile": profile, "settings": portable_settings})
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_jsonable(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _jsonable(v) for k, v in value.items()}
    return value


def _is_utf8(text: str) -> bool:
    """False for the bytes of another encoding that a command line or file name may hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def coerce(value: Any, hint: Any, name: str) -> Any:
    """Turn a `-o` string or a Python value into the type of field `name`.

    Raises:
        UsageError: naming the field, the value and the expected type.
    """
    origin, args = get_origin(hint), get_args(hint)
    shown = getattr(hint, "__name__", None) if origin is None else str(hint).replace("typing.", "")
    wrong = UsageError(f"Setting {name}={value!r} is not a valid {shown}.")
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if type(None) in args:
                return None
            raise wrong
        for option in args:
            if option is not type(None):
                try:
                    return coerce(value, option, name)
                except UsageError:
                    continue
        raise wrong
    if origin is Literal:
        if value in args:
            return value
        raise unknown(f"value of setting {name}:", str(value), [str(a) for a in args])
    if origin is tuple:
        if isinstance(value, str):
            text = value.strip()
            try:
                parsed = (
                    yaml.safe_load(text)
                    if text.startswith(("[", "("))
                    else [p for p in text.split(",") if p.strip()]
                )
            except yaml.YAMLError:
                raise wrong from None
            if isinstance(parsed, str):  # "(1, 2)" is a plain string in YAML
                parsed = [p for p in parsed.strip("()").split(",") if p.strip()]
            value = [p.strip() if isinstance(p, str) else p for p in parsed]
        if not isinstance(value, list | tuple):
            value = [value]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(coerce(v, args[0], name) for v in value)
        if len(args) != len(value):
            raise wrong
        return tuple(coerce(v, a, name) for v, a in zip(value, args, strict=True))
    if hint is bool:
        if isinstance(value, bool):
            return value
        flag = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}.get(
            str(value).lower()
        )
        if flag is None:
            raise wrong
        return flag
    if hint in (int, float):
        if isinstance(value, bool):
            raise wrong
        try:
            if hint is float:
                if not math.isfinite(real := float(value)):  # no id or record can hold it
                    raise wrong
                return real
            number = float(value)  # accepts 1e4
            if number != int(number):
                raise wrong
            return (
                int(number)
                if number != value and isinstance(value, str) and "e" in value.lower()
                else int(value)
            )
        except (TypeError, ValueError, OverflowError):
            raise wrong from None
    if hint is Path:
        return Path(value)
    if hint is str:
        if not isinstance(value, str | Path) or not _is_utf8(str(value)):
            raise wrong
        return str(value)
    return value
