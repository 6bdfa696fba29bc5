"""Text to token ids, (L,) int64: CLIP's byte-pair encoding without torch or open_clip, in one place.

Equal to open_clip's `SimpleTokenizer` with its default cleaning, for every text but two kinds:

- *Control tokens.* open_clip turns the literal strings "<start_of_text>" and "<end_of_text>" inside a text
  into the control tokens themselves, so whoever writes a label could end the prompt there. Here a text is
  text: they are spelled with ordinary tokens, and the control tokens stand at the start and the end only.
- *Very long texts.* When rows of L tokens are asked for, only the first `max(4096, 64 * L)` characters are
  looked at, and the rest is reported as cut. The longest entry of CLIP's vocabulary has 32 characters, so
  that many still fill the row unless more than half of them are white space or HTML entities. Two things
  could in principle reach back over the cut: the repair of wrongly decoded text, which judges a line as a
  whole, and a single word of thousands of letters, whose merges can depend on its end.

Source of the method: Radford et al. 2021 (CLIP), section 2.4; Sennrich et al. 2016 for byte-pair encoding.
"""

from __future__ import annotations

import gzip
import heapq
import html
import importlib.util
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import ftfy
import numpy as np
import numpy.typing as npt
import regex

from dear_serve.errors import BundleError, ConfigError, MissingDependencyError, TextError

__all__ = ["Tokenizer", "clean_text", "split_words", "token_lengths"]

CLIP_MERGES = 48894  # merges of CLIP's vocabulary; its file lists more, unused

_WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+", regex.IGNORECASE)
_CACHED_WORDS = 2**15
_CACHED_LENGTH = 64  # longer words are rare and would make the cache large
_FORMAT = "dear-serve-bpe"
_VERSION = 1


def clean_text(text: str) -> str:
    """`text` as the tokenizer sees it: repaired (ftfy), HTML entities resolved, spaces single, lower case."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


def split_words(text: str) -> Iterator[str]:
    """The words of `clean_text(text)` that are encoded one by one; none for a text of white space."""
    return (match.group() for match in _WORD.finditer(clean_text(text)))


def token_lengths(tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Tokens in use of each row, start and end included: (B, L) to (B,). End-of-text is the highest id."""
    lengths: npt.NDArray[np.int64] = tokens.argmax(axis=1) + 1
    return lengths


class Tokenizer:
    """CLIP's tokenizer over a list of merges.

    Ids: 0 to 255 the bytes (in CLIP's order), 256 to 511 the bytes that end a word, then one per merge, then
    start-of-text and end-of-text. Rows are padded with 0.

    Args:
        merges: "left right" each, in order of precedence; "</w>" marks the end of a word.
        context_length: L, control tokens included; 2 or more.

    Raises:
        ConfigError: for a context length below 2 or a merge of parts that are not in the vocabulary so far.
    """

    def __init__(self, merges: Sequence[str], *, context_length: int) -> None:
        if context_length < 2:
            raise ConfigError(
                f"context_length is {context_length}; start and end alone take 2", field="context_length"
            )
        self.context_length = context_length
        self._merges_text = tuple(merges)
        letters = _byte_letters()
        self._byte_ids = {byte: i for i, byte in enumerate(letters)}
        vocabulary = {letter: i for i, letter in enumerate(letters.values())}
        vocabulary |= {letter + "</w>": i + 256 for letter, i in vocabulary.items()}
        # Ids grow with rank, so the id a merge makes is its precedence too.
        self._merges: dict[tuple[int, int], int] = {}
        for i, merge in enumerate(self._merges_text):
            left, _, right = merge.partition(" ")
            if left not in vocabulary or right not in vocabulary or left + right in vocabulary:
                raise ConfigError(f"merge {i} is {merge!r}; two known parts with a new union are expected")
            self._merges[vocabulary[left], vocabulary[right]] = 512 + i
            vocabulary[left + right] = 512 + i
        self.sot_token = 512 + len(self._merges_text)
        self.eot_token = self.sot_token + 1
        self.vocab_size = self.sot_token + 2
        self._cached_ids = lru_cache(maxsize=_CACHED_WORDS)(self._word_ids)

    @classmethod
    def from_open_clip(cls, context_length: int = 77) -> Tokenizer:
        """CLIP's own vocabulary, read from the installed open_clip package without importing it.

        Raises:
            MissingDependencyError: if open_clip is not installed.
        """
        spec = importlib.util.find_spec("open_clip")
        if spec is None or not spec.submodule_search_locations:
            raise MissingDependencyError(
                "CLIP's vocabulary comes with open_clip, which is missing: pip install 'dear-serve[train]'"
            )
        path = Path(spec.submodule_search_locations[0]) / "bpe_simple_vocab_16e6.txt.gz"
        lines = gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")
        return cls(lines[1 : 1 + CLIP_MERGES], context_length=context_length)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read what `to_file` wrote. Raises BundleError naming the file if it is absent or not that."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise BundleError(f"{path} does not exist; a bundle carries its tokenizer") from error
        except (OSError, ValueError) as error:
            raise BundleError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise BundleError(f"{path} is not a tokenizer of format {_FORMAT!r} version {_VERSION}")
        merges, length = data.get("merges"), data.get("context_length")
        if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
            raise BundleError(f"{path}: 'merges' is not a list of texts")
        if not isinstance(length, int) or isinstance(length, bool):
            raise BundleError(f"{path}: 'context_length' is {length!r}; a whole number is expected")
        try:
            return cls(merges, context_length=length)
        except ConfigError as error:
            raise BundleError(f"{path}: {error.message}") from error

    def to_file(self, path: str | Path) -> None:
        """Write everything `from_file` needs, as JSON of about 0.6 MB."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "context_length": self.context_length,
            "merges": self._merges_text,
        }
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        Path(path).write_text(text + "\n", encoding="utf-8")

    def encode(self, text: str) -> list[int]:
        """All ids of `text`, however long, without control tokens; empty for a text of white space."""
        return [token for word in split_words(text) for token in self._ids(word)]

    def __call__(self, texts: str | Sequence[str]) -> npt.NDArray[np.int64]:
        """(B, L) int64: start, text, end, zeros; a text too long for L is cut before the end token.

        Raises:
            TextError: if something in `texts` is not a text.
        """
        return self.tokenize(texts)[0]

    def tokenize(self, texts: str | Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """`self(texts)`, (B, L) int64, and which of the texts were cut, (B,) bool."""
        texts = [texts] if isinstance(texts, str) else texts
        tokens = np.zeros((len(texts), self.context_length), dtype=np.int64)
        cut = np.zeros(len(texts), dtype=np.bool_)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise TextError(f"text {row} is {text!r:.80}; a text is expected")
            ids, cut[row] = self._head(text)
            tokens[row, : len(ids) + 2] = [self.sot_token, *ids, self.eot_token]
        return tokens, cut

    def was_truncated(self, text: str) -> bool:
        """Whether `self([text])` leaves out a part of `text`."""
        return self._head(text)[1]

    def _head(self, text: str) -> tuple[list[int], bool]:
        """The first L - 2 ids of `text`, and whether there is more; the cost is bounded (see the top)."""
        room, most = self.context_length - 2, max(4096, 64 * self.context_length)
        more = False
        if len(text) > most:
            text = text.lstrip()
            text, more = text[:most], len(text.rstrip()) > most
        ids: list[int] = []
        for word in split_words(text):
            ids += self._ids(word)
            if len(ids) > room:
                return ids[:room], True
        return ids, more

    def _ids(self, word: str) -> Sequence[int]:
        return self._cached_ids(word) if len(word) <= _CACHED_LENGTH else self._word_ids(word)

    def _word_ids(self, word: str) -> tuple[int, ...]:
        """Byte-pair encoding of one word: the leftmost pair of best precedence is merged until none is left.

        A heap of pairs over a linked list, n log n in the word's length, so that no word is expensive.
        """
        ids = [self._byte_ids[byte] for byte in word.encode("utf-8")]
        ids[-1] += 256
        n = len(ids)
        ids.append(-1)  # stands left of the first and right of the last: -1 is in no pair
        following, previous = list(range(1, n + 1)), list(range(-1, n))
        find = self._merges.get
        heap = [(new, i) for i in range(n) if (new := find((ids[i], ids[i + 1]))) is not None]
        heapq.heapify(heap)
        while heap:
            new, i = heapq.heappop(heap)
            j = following[i]
            if find((ids[i], ids[j])) != new:
                continue  # one of the two has been merged elsewhere
            ids[i], ids[j] = new, -1
            following[i] = following[j]
            previous[following[i]] = i
            for left in (previous[i], i):
                merged = find((ids[left], ids[following[left]]))
                if merged is not None:
                    heapq.heappush(heap, (merged, left))
        return tuple(token for token in ids if token >= 0)


def _byte_letters() -> dict[int, str]:
    """CLIP's printable letter for each byte, in the order of its ids: first those that are printable."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}
