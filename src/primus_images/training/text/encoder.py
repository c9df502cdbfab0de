"""The tokens of one document, as transformers makes them.

A document of plain text is what ``AutoTokenizer`` returns, between its BOS and EOS tokens if it has
them. A chat is what ``apply_chat_template`` returns: see :mod:`primus_images.training.text.chat`.
Truncation and padding never apply. Only transformers is needed.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import primus_images
from primus_images.errors import HostError, InputError
from primus_images.files import json_if_readable, read_bytes, reason_of, refuse_pointer
from primus_images.training.text import chat
from primus_images.training.text.corpus import tokenizer_folder
from primus_images.training.text.document import Document
from primus_images.training.text.rows import first_line

_TEMPLATE = "chat_template"
_VOCABULARIES = ("*.model", "*.tiktoken", "tokenizer.json", "tekken.json", "vocab*")


def without_torch() -> None:
    """Let transformers load tokenizers without torch, whose import takes seconds, in this process.

    It is never that of the current folder, which an empty part of PYTHONPATH would put on the path
    of modules.
    """
    here = Path.cwd()
    own = Path(primus_images.__file__).parents[1]
    sys.path[:] = [
        place for place in sys.path if Path(place).resolve() != here or Path(place) == own
    ]
    try:
        import transformers.utils
    except ImportError as error:
        raise HostError(
            f"transformers cannot be imported: {first_line(error)}",
            hint="run this inside a primus image",
        ) from None
    if "torch" not in sys.modules:
        transformers.utils.is_torch_available = _never
        transformers.utils.import_utils.is_torch_available = _never


def _never() -> bool:
    return False


class Encoder:
    """The tokenizer in a folder or on the hub, as ``AutoTokenizer`` loads it.

    ``begin`` and ``end`` are its BOS and EOS tokens, or None. ``template`` is a file with a chat
    template in place of its own. ``remarks`` counts the documents with what may be a mistake of
    their author. Raises InputError if it cannot be loaded.
    """

    def __init__(self, name: str, template: Path | None = None) -> None:
        folder = tokenizer_folder(name)
        self.name = name
        self.remarks: Counter[str] = Counter()
        self.tokenizer = _loaded(name, folder)
        if template:
            self.tokenizer.chat_template = template_of(template)
        self.begin: int | None = self.tokenizer.bos_token_id
        # Some tokenizers have a BOS token, and say that text does not begin with it.
        if json_if_readable(folder / "tokenizer_config.json").get("add_bos_token") is False:
            self.begin = None
        self.end: int | None = self.tokenizer.eos_token_id
        if self.end is None:
            self.end = _end_of_model(name, folder, len(self.tokenizer))

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of plain documents."""
        encoded = self.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False
        )
        return [self._between(tokens) for tokens in encoded["input_ids"]]

    def _between(self, tokens: list[int]) -> list[int]:
        """Return ``tokens`` between BOS and EOS."""
        if self.begin is not None and tokens[:1] != [self.begin]:
            tokens = [self.begin, *tokens]
        if self.end is not None and tokens[-1:] != [self.end]:
            tokens = [*tokens, self.end]
        return tokens

    def document(
        self, document: Document, where: str, *, completions: bool = True
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a document, and 1 for each that is trained.

        Without ``completions``, all tokens of a chat are.
        """
        if document.messages is not None:
            if self.tokenizer.chat_template:
                return chat.encoded(
                    self.tokenizer,
                    document,
                    where,
                    completions=completions,
                    remarks=self.remarks,
                )
            if not document.text:
                hint = (
                    "chat_template=FILE names a template; or assets.tokenizer=FOLDER of an "
                    "instruction-tuned model, whose tokenizer has one"
                )
                beside = Path(self.name) / f"{_TEMPLATE}.json"
                if beside.is_file():
                    hint = f"that of its processor: chat_template={beside}"
                raise InputError(
                    f"the corpus contains chat messages, but the tokenizer {self.name} has no chat "
                    "template",
                    where=where,
                    hint=hint,
                )
        if not document.text[document.prompt :].strip():
            self.remarks[chat.EMPTY] += 1
        encoded = self.tokenizer(document.text, return_offsets_mapping=True)
        tokens = encoded["input_ids"]
        mask = []
        for start, end in encoded["offset_mapping"]:
            mask.append(int(end > max(start, document.prompt)))
        whole = self._between(tokens)
        if tokens[:1] != whole[:1]:
            mask.insert(0, 0)
        if len(mask) < len(whole):
            mask.append(1)
        if whole[-1] == self.end:
            mask[-1] = 1
        return whole, mask

    def parts(self, tokens: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
        """Return the text of ``tokens`` in parts, and whether each is trained."""
        parts = []
        before = ""
        end = 0
        for trained, run in groupby(mask[: len(tokens)], key=bool):
            end += len(list(run))
            # Parts of a text, since a tokenizer may decode the beginning of a text in another way.
            text: str = self.tokenizer.decode(tokens[:end], clean_up_tokenization_spaces=False)
            if end < len(tokens):
                text = text.rstrip("\ufffd")
            parts.append((text[len(before) :], trained))
            before = text
        return parts


def template_of(file: Path) -> str:
    """Return the chat template in ``file``, which may be a processor's ``chat_template.json``.

    Raises InputError if it is no text.
    """
    try:
        text = read_bytes(file).decode()
    except OSError as error:
        raise InputError(f"cannot be read: {reason_of(error)}", where=str(file)) from error
    except UnicodeDecodeError:
        raise InputError("a chat template is UTF-8 text", where=str(file)) from None
    if not text.strip():
        raise InputError("the chat template is empty", where=str(file))
    settings: Any = None
    with suppress(ValueError, RecursionError):
        settings = json.loads(text)
    if settings is None:
        return text
    template = settings
    if isinstance(settings, dict):
        template = settings.get(_TEMPLATE)
    if not isinstance(template, str):
        raise InputError(
            "this JSON has no chat_template that is one text",
            where=str(file),
            hint="name a file with the Jinja text of a template",
        )
    return template


def _loaded(name: str, folder: Path) -> Any:
    """Load a tokenizer. Raises InputError if it is none that tokenizes text always the same."""
    for pattern in _VOCABULARIES:
        for file in folder.glob(pattern):
            refuse_pointer(file)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
        tokenizer("some settings of a wrong type only fail here")
    except Exception as error:
        message = f"the tokenizer cannot be loaded: {first_line(error)}"
        if "trust_remote_code" in str(error):
            message = (
                "the tokenizer cannot be loaded: it needs custom code (auto_map), which primus "
                "does not run"
            )
        hint = "set assets.tokenizer to a folder that AutoTokenizer can load"
        if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
            message = "the folder has no tokenizer (tokenizer.json or tokenizer.model)"
        elif not (folder / "tokenizer.json").is_file() and any(folder.glob("*.model")):
            message = f"the folder has no tokenizer.json, only another form: {first_line(error)}"
            hint = (
                "take tokenizer.json from the model's source; or load the folder by AutoTokenizer "
                "where sentencepiece is installed, and save_pretrained"
            )
        raise InputError(message, where=name, hint=hint) from error
    if not tokenizer.is_fast:
        raise InputError("the tokenizer has no fast form (tokenizer.json)", where=name)
    if getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise InputError(
            "the tokenizer tokenizes the same text differently each time",
            where=f"{name}/tokenizer.json: model.dropout",
            hint="set it to null",
        )
    return tokenizer


def _end_of_model(name: str, folder: Path, vocabulary: int) -> int | None:
    """Return the EOS token that the model's configuration names, or None."""
    for file in ("config.json", "generation_config.json"):
        number = json_if_readable(folder / file).get("eos_token_id")
        if isinstance(number, list) and number:
            number = number[0]
        if not isinstance(number, int) or number < 0:
            continue
        if number >= vocabulary:
            raise InputError(
                f"{number} is no token of the tokenizer, which has {vocabulary}",
                where=f"{name}/{file}: eos_token_id",
                hint="correct it, or remove it",
            )
        return number
    return None
