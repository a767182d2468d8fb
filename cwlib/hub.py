"""The paper's range: encoders and decoders of the model hub, 45 million to 7.5 billion parameters, with their commits.

Choices: base models, not tuned to follow instructions; BERT uncased; Pythia trained on the Pile as it is, not on the
deduplicated one; Mistral 7B in its first version. Facts are those of each model's config.json; parameters are counted
without an output matrix, as `cwlib.open_checkpoint` loads them. The commits hold safetensors throughout.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cwlib.catalogue import CATALOGUE, Entry

STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class HubEntry:
    """One checkpoint of the hub.

    Attributes
    ----------
    name
        Its id, "organisation/name".
    family
        Models that differ in little but size; C3 fits a slope over each family.
    precision
        As the weights are stored on the hub.
    tied
        Whether the output matrix is the embedding; otherwise it is in the files too.
    gated
        Whether its authors ask for a request, or for contact details, before they give access.
    revision
        The commit that is meant, or None for what the main branch holds at the time of downloading.
    """

    name: str
    family: str
    kind: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_model: int
    vocabulary: int
    precision: str
    tied: bool
    licence: str
    gated: bool
    revision: str | None

    @property
    def download_bytes(self) -> int:
        """About what is downloaded: the weights as stored; files hold little else."""
        head = 0 if self.tied else self.vocabulary * self.d_model
        return (self.parameters + head) * STORED_BYTES[self.precision]


def _read() -> dict[str, HubEntry]:
    records = json.loads(Path(__file__).with_name("hub.json").read_text("utf-8"))
    return {record["name"]: HubEntry(**record) for record in records}


HUB = _read()


def known(name: str) -> Entry | HubEntry | None:
    """What the catalogue or the list of the hub says about a checkpoint; None about any other."""
    return CATALOGUE.get(name) or HUB.get(name)
