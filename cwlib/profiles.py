"""What a study is asked for: a profile or a list of checkpoints, and texts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cwlib.catalogue import CATALOGUE
from cwlib.corpus import Passage, passages
from cwlib.hub import HUB

PROFILES = {
    # name -> checkpoints, and those of them that are measured once more after rounding
    "smoke": (("tiny-bert", "tiny-llama"), ("tiny-bert",)),
    "wheels": (tuple(CATALOGUE), tuple(name for name, item in CATALOGUE.items() if item.precision == "float32")),
    "hub": (tuple(HUB), ()),
}


def corpus_of(profile: str | Path | Sequence[str | Path]) -> Sequence[Passage]:
    """The texts that a profile is measured on unless others are given: a few words for tiny models, else the corpus."""
    if profile == "smoke":  # tiny models count bytes as tokens
        return [replace(p, text=p.text[:60]) for p in passages()[:2]]
    return passages()


def asked_for(
    profile: str | Path | Sequence[str | Path], texts: Sequence[Passage] | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Passage, ...]]:
    """Checkpoints, those of them that are rounded, and texts."""
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(
                f"profile: expected one of {', '.join(PROFILES)} or a list of checkpoints, got {profile!r}; "
                f"for one checkpoint write [{profile!r}]"
            )
        names, control = PROFILES[profile]
    else:
        listed = [profile] if isinstance(profile, Path) else profile
        # a Path is a folder, never a name of the catalogue
        named = [str(p.resolve()) if isinstance(p, Path) else p for p in listed]
        places: dict[str, str] = {}  # one folder may be spelt in several ways
        for name in named:
            places.setdefault(str(Path(name).resolve()) if name and Path(name).exists() else name, name)
        names = tuple(places.values())
        control = ()
        if not names:
            raise ValueError("profile: expected a profile or at least one checkpoint, got none")
    texts = corpus_of(profile) if texts is None else texts
    if not all(isinstance(p, Passage) for p in texts):
        raise ValueError("texts: expected passages; read your files with cwlib.corpus.read_passages(path)")
    if len({p.name for p in texts}) < len(texts):
        raise ValueError("texts: expected passages of different names, got one twice; rename it")
    return names, control, tuple(texts)
