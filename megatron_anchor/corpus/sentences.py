"""Sentence splitting with nltk's Punkt models, as in Megatron's tool.

The models are nltk's `punkt_tab` folders (plain tables; the pickles of old versions are not read).
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_anchor.errors import UserError

_PIECE = 1_000_000  # characters given to Punkt at once, as in Megatron's tool
_FILES = ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab")


@dataclass(frozen=True)
class SplitterConfig:
    """Language of the Punkt model, where it lies, and whether sentences keep their newlines."""

    language: str = "english"
    keep_newlines: bool = False
    punkt_path: str | None = None
    """A `punkt_tab` folder, the folder of one language inside it, or `punkt_tab.zip`."""


def make_splitter(config: SplitterConfig) -> Callable[[str], list[str]]:
    """A function from a text to its sentences; `UserError` where the model is missing."""
    from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer

    class WithNewlines(PunktLanguageVars):
        # A sentence takes the white space that follows it along, so no newline is lost.
        _period_context_fmt = r"""
            \S*
            %(SentEndChars)s
            \s*
            (?=(?P<after_tok>
                %(NonWord)s
                |
                (?P<next_tok>\S+)
            ))"""

    parameters = _parameters(config)
    variables = WithNewlines() if config.keep_newlines else PunktLanguageVars()
    punkt = PunktSentenceTokenizer(parameters, lang_vars=variables)

    def split(text: str) -> list[str]:
        if len(text) <= _PIECE:
            return punkt.tokenize(text)
        starts = range(0, len(text), _PIECE)
        return [s for at in starts for s in punkt.tokenize(text[at : at + _PIECE])]

    return split


def model_digest(config: SplitterConfig) -> str:
    """Tell Punkt models apart, wherever they lie (hex)."""
    parameters = _parameters(config)
    parts = (
        sorted(parameters.collocations),
        sorted(parameters.sent_starters),
        sorted(parameters.abbrev_types),
        sorted(parameters.ortho_context.items()),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _parameters(config: SplitterConfig):
    if config.punkt_path is None:
        return _installed(config.language)
    path = Path(config.punkt_path)
    if path.is_file() and zipfile.is_zipfile(path):
        with tempfile.TemporaryDirectory() as folder:
            with zipfile.ZipFile(path) as archive:
                names = [n for n in archive.namelist() if f"/{config.language}/" in f"/{n}"]
                archive.extractall(folder, names)  # zipfile itself keeps names inside the folder
            return _from_folder(Path(folder), config)
    return _from_folder(path, config)


def _from_folder(path: Path, config: SplitterConfig):
    candidates = [path, path / config.language, path / "punkt_tab" / config.language]
    folder = next((c for c in candidates if all((c / name).is_file() for name in _FILES)), None)
    if folder is None:
        raise UserError(
            f"--punkt-path {config.punkt_path}: no Punkt model for --lang {config.language} there; "
            f"expected a folder with {', '.join(_FILES)}, or punkt_tab.zip as nltk publishes it"
        )
    from nltk.tabdata import PunktDecoder
    from nltk.tokenize.punkt import PunktParameters

    def lines(name: str) -> io.StringIO:
        return io.StringIO((folder / name).read_text(encoding="utf-8"))

    decoder, parameters = PunktDecoder(), PunktParameters()
    parameters.collocations = set(decoder.tab2tups(lines("collocations.tab")))
    parameters.sent_starters = decoder.txt2set(lines("sent_starters.txt"))
    parameters.abbrev_types = decoder.txt2set(lines("abbrev_types.txt"))
    parameters.ortho_context = decoder.tab2intdict(lines("ortho_context.tab"))
    return parameters


def _installed(language: str):
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        return PunktTokenizer(language)._params
    except (LookupError, ValueError, OSError) as error:
        raise UserError(
            f"nltk has no Punkt model for --lang {language} (looked in NLTK_DATA="
            f"{os.environ.get('NLTK_DATA', '')!r} and nltk's usual folders). Fetch it with "
            "`python -m nltk.downloader punkt_tab`, or give a local copy with --punkt-path"
        ) from error
