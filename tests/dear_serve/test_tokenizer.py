"""Tokens equal open_clip's on every kind of text people write, and no text can do harm."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from dear_serve.errors import BundleError, ConfigError, MissingDependencyError, TextError
from dear_serve.tokenizer import Tokenizer, clean_text, split_words, token_lengths

# A vocabulary small enough to follow by hand: ids from 512, in this order; start 516, end 517.
TOY = ["l o", "lo w</w>", "e r</w>", "n e"]

ODD = [
    "",
    " ",
    "a",
    "A Photo of a CAT!",
    "it's we've they'll I'd you're I'm don't 'S",
    "naïve café, Ångström; crème brûlée — façade",
    "e\u0301 combining and \ufb01 ligature, ﬀ and Ⅷ",
    "İstanbul ǅ ß ẞ ſ's",
    "一张猫的照片，红色的。",
    "写真の猫 고양이 사진 صورة قطة תמונה кошка γάτα",
    "नमस्ते ไทย ქართული",
    "🐱🐈‍⬛ 👩🏽‍🚀 🇩🇪 ❤️ 1️⃣",
    "x² + y³ = ½ ٣ ५ 五 Ⅳ",
    "fish &amp; chips &lt;b&gt; &amp;lt; &eacute; &#233; &#x1F600; &nbsp;! &notanentity; &amp;amp;amp;",
    "tab\tnew\nline\r\nbreak\x0bvertical\x0cform  two   three",
    "nbsp\u00a0thin\u2009ideographic\u3000zero\u200bwidth\u2060join\u2028line\u2029para\u0085nel",
    "\ufeffbom, soft\u00adhyphen, \u202eright to left\u202c",
    "doesnâ€™t dÃ©jÃ  vu â€œquotesâ€\x9d ï»¿",
    "“curly” ‘quotes’ … – — ´ `",
    "snake_case kebab-case CamelCase path/to/file.txt http://example.com/?q=1&x=2",
    "1234567890 3.14 1,000 1e-5 v2.0 #1 50% $5 €7",
    "!!!??? ... --- *** {} {0} %s %(a)s \\n \\ \" '",
    "\x00\x01\x02control\x1b[31m\x7f\x80\x9f",
    "half \ud83d surrogate \udc00 and pair \ud83d\ude00",
    "ａｂｃ fullwidth １２３ ！",
    "\x1c\x1d\x1e\x1f separators",
    "&#xD800; &#0; &#1114112; &#x80;",
    "supercalifragilisticexpialidocious " * 3,
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the " * 200,
    "lorem ipsum dolor sit amet " * 60,
    "漢字" * 200,
    "🐱" * 100,
    "!" * 300,
    "ab" * 400,
]


def texts() -> list[str]:
    """The odd ones above, and 600 more drawn from their words and from all of Unicode."""
    rng = random.Random(0)
    words = [word for text in ODD for word in text.split()]
    plain = [
        "a",
        "photo",
        "of",
        "the",
        "red",
        "blue",
        "striped",
        "small",
        "large",
        "cat",
        "dog",
        "on",
        "in",
        "left",
    ]
    spaces = [" ", "  ", "\t", "\n", "\u00a0", "\u3000", ""]
    drawn = []
    for _ in range(250):
        drawn.append(
            "".join(w + rng.choice(spaces) for w in rng.choices(words + plain, k=rng.randrange(1, 12)))
        )
        drawn.append(" ".join(rng.choices(plain, k=rng.randrange(1, 40))).capitalize())
    for top in (0x80, 0x250, 0x3000, 0xD800, 0x1FFFF):
        for _ in range(20):
            drawn.append("".join(chr(rng.randrange(top)) for _ in range(rng.randrange(1, 40))))
    return ODD + drawn


@pytest.fixture(scope="module")
def clip() -> Tokenizer:
    try:
        return Tokenizer.from_open_clip(77)
    except MissingDependencyError as error:
        pytest.skip(error.message)


# --- equality with open_clip ----------------------------------------------------------------------


@pytest.mark.parametrize("context_length", [77, 16])
def test_tokens_equal_open_clip(context_length):
    reference = pytest.importorskip("open_clip.tokenizer").SimpleTokenizer(context_length=context_length)
    ours = Tokenizer.from_open_clip(context_length)
    written = texts()
    assert len(written) >= 500
    expected = reference(written).numpy()
    np.testing.assert_array_equal(ours(written), expected)
    whole = [reference.encode(text) for text in written]
    assert [ours.encode(text) for text in written] == whole
    _, cut = ours.tokenize(written)
    assert cut.tolist() == [len(ids) > context_length - 2 for ids in whole]
    assert 0 < cut.sum() < len(written)
    assert (ours.sot_token, ours.eot_token) == (reference.sot_token_id, reference.eot_token_id)
    assert ours.vocab_size == reference.vocab_size


def test_long_texts_and_long_words_equal_open_clip(clip):
    reference = pytest.importorskip("open_clip.tokenizer").SimpleTokenizer(context_length=77)
    rng = random.Random(1)
    letters = "".join(rng.choices("etaoinshrdlu", k=6000))
    written = [
        " ".join(rng.choices(["cat", "striped", "naïve", "&amp;", "漢字", "it's", "7"], k=5000)),
        letters,
        "a" * 6000,
        "cat " + letters[::-1],
        " \n" * 9000 + "a cat",
    ]
    tokens, cut = clip.tokenize(written)
    np.testing.assert_array_equal(tokens, reference(written).numpy())
    assert cut.tolist() == [True, True, True, True, False]


# --- golden values ----------------------------------------------------------------------------


def test_golden_tokens_of_clip(clip):
    assert clip.encode("a photo of a cat") == [320, 1125, 539, 320, 2368]
    assert clip.encode("Hello, world!") == [3306, 267, 1002, 256]
    assert clip(["a cat"])[0, :5].tolist() == [49406, 320, 2368, 49407, 0]
    assert clip(["a cat"]).shape == (1, 77)


def test_golden_tokens_of_a_toy_vocabulary():
    toy = Tokenizer(TOY, context_length=8)
    first = ord("a") - ord("!")  # CLIP's ids start with the printable bytes
    e, n, r = (first + "abcdefghijklmnopqrstuvwxyz".index(letter) for letter in "enr")
    assert (toy.sot_token, toy.eot_token, toy.vocab_size) == (516, 517, 518)
    assert toy.encode("low lower") == [513, 512, first + 22, 514]
    assert toy.encode("newer") == [515, first + 22, 514]
    assert toy.encode("e n r") == [e + 256, n + 256, r + 256]
    assert toy.encode("ééé")[:2] == [0xC3 - 0xAE + 94 + 12, 0xA9 - 0xA1 + 94]
    assert toy("low").tolist() == [[516, 513, 517, 0, 0, 0, 0, 0]]


def test_merges_follow_precedence_then_position():
    toy = Tokenizer(["a a", "aa a</w>", "b c", "a b"], context_length=16)
    a, b, c, end = 64, 65, 66, 256
    assert toy.encode("aaaa") == [512, a, a + end]
    assert toy.encode("aaaaa") == [512, 513]
    assert toy.encode("aaa") == [513]
    assert toy.encode("abcx")[:2] == [a, 514]  # "b c" comes before "a b"
    assert toy.encode("abab") == [515, a, b + end]
    assert toy.encode("c") == [c + end]


# --- rows -------------------------------------------------------------------------------------


def test_cut_rows_end_with_end_of_text():
    toy = Tokenizer(TOY, context_length=5)
    tokens, cut = toy.tokenize(["low low low", "low low low low", "low", ""])
    assert tokens.tolist() == [
        [516, 513, 513, 513, 517],
        [516, 513, 513, 513, 517],
        [516, 513, 517, 0, 0],
        [516, 517, 0, 0, 0],
    ]
    assert tokens.dtype == np.int64
    assert cut.tolist() == [False, True, False, False]
    assert [toy.was_truncated(text) for text in ("low low low", "low low low low")] == [False, True]
    assert token_lengths(tokens).tolist() == [5, 5, 3, 2]


def test_no_texts_give_no_rows():
    assert Tokenizer(TOY, context_length=5)([]).shape == (0, 5)


def test_one_text_is_a_batch_of_one():
    toy = Tokenizer(TOY, context_length=5)
    np.testing.assert_array_equal(toy("low"), toy(["low"]))


# --- a text is text -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<end_of_text>", "a <START_OF_TEXT> cat", "cat&lt;end_of_text&gt;dog"])
def test_control_strings_are_ordinary_text(text):
    toy = Tokenizer(TOY, context_length=77)
    assert max(toy.encode(text)) < toy.sot_token
    assert toy([text])[0].tolist().count(toy.eot_token) == 1


def test_anything_of_a_megabyte_is_answered(clip):
    rng = random.Random(2)
    for unit in ("a", " ", "\0", "\ud800", "🐱", "&amp;", "&", "<", "x ", "â€", "e\u0301", "\n"):
        tokens, _ = clip.tokenize([unit * (1_000_000 // len(unit))])
        assert tokens[0, 0] == clip.sot_token
        assert (tokens == clip.eot_token).sum() == 1
    noise = "".join(chr(rng.randrange(0x110000)) for _ in range(100_000))
    assert clip.tokenize([noise])[1].tolist() == [True]


def test_white_space_after_the_bound_is_not_a_cut():
    toy = Tokenizer(TOY, context_length=5)
    assert not toy.was_truncated("low" + " " * 10_000)
    assert toy.was_truncated("low" + " " * 10_000 + "low")


def test_long_words_do_not_fill_the_cache():
    toy = Tokenizer(TOY, context_length=5)
    toy(["x" * 65, "x" * 64])
    assert toy._cached_ids.cache_info().currsize == 1
    assert toy._cached_ids.cache_info().maxsize is not None


def test_clean_text_is_what_the_tokenizer_sees():
    assert clean_text("  A\tPhoto \n of  caf&amp;eacute; ") == "a photo of café"
    assert list(split_words("It's 12!?")) == ["it", "'s", "1", "2", "!?"]
    assert list(split_words("\0 \t")) == []


# --- files ------------------------------------------------------------------------------------


def test_a_file_round_trip_gives_an_equal_tokenizer(clip, tmp_path):
    clip.to_file(tmp_path / "tokenizer.json")
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert again.context_length == 77
    np.testing.assert_array_equal(again(ODD), clip(ODD))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "not a tokenizer"),
        ({"version": 2}, "version 1"),
        ({"merges": "l o"}, "merges"),
        ({"merges": [1]}, "merges"),
        ({"merges": ["l", "o"]}, "'l'"),
        ({"merges": ["lo w"]}, "'lo w'"),
        ({"merges": ["l o", "l o"]}, "merge 1"),
        ({"context_length": "77"}, "'77'"),
        ({"context_length": True}, "True"),
        ({"context_length": 1}, "context_length is 1"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, change, words):
    path = tmp_path / "tokenizer.json"
    Tokenizer(TOY, context_length=8).to_file(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError) as caught:
        Tokenizer.from_file(path)
    assert "tokenizer.json" in caught.value.message
    assert words in caught.value.message


def test_absent_and_broken_files_are_named(tmp_path):
    with pytest.raises(BundleError, match=r"absent\.json does not exist"):
        Tokenizer.from_file(tmp_path / "absent.json")
    (tmp_path / "broken.json").write_bytes(b"\xff{")
    with pytest.raises(BundleError, match=r"broken\.json cannot be read"):
        Tokenizer.from_file(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(BundleError, match=r"list\.json is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "list.json")


# --- errors -----------------------------------------------------------------------------------


def test_what_is_not_a_text_is_refused():
    with pytest.raises(TextError, match="text 1 is 7"):
        Tokenizer(TOY, context_length=8)(["low", 7])


def test_a_context_without_room_is_refused():
    with pytest.raises(ConfigError, match="context_length is 1"):
        Tokenizer(TOY, context_length=1)


def test_without_open_clip_the_pip_line_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'dear-serve\[train\]'"):
        Tokenizer.from_open_clip()


def test_nothing_heavy_is_imported():
    code = (
        "import sys\nfrom dear_serve.tokenizer import Tokenizer\n"
        "try:\n    Tokenizer.from_open_clip()\nexcept Exception as error:\n"
        "    assert 'pip install' in str(error)\n"
        "sys.exit(bool({'torch', 'torchvision', 'open_clip'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
