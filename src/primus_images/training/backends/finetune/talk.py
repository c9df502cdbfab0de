"""Answers of an exported model, by transformers' ``generate``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
from transformers.utils import logging

from primus_images.errors import InputError
from primus_images.training.text.rows import first_line


class _Shown(TextStreamer):
    """Gives each part of an answer to ``show`` as soon as its characters are complete."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._show = show

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Show ``text``; the end of the answer needs no line of its own."""
        self._show(text)


class Talk:
    """The model, or the adapters, in ``folder``, on a GPU if there is one."""

    def __init__(self, folder: Path) -> None:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        kind: Any = AutoModelForCausalLM
        if (folder / "adapter_config.json").is_file():
            from peft import AutoPeftModelForCausalLM

            kind = AutoPeftModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model: Any = kind.from_pretrained(folder, dtype="auto").to(device).eval()

    @property
    def chats(self) -> bool:
        """Whether there is a chat template; otherwise, the model continues text."""
        return bool(self._tokenizer.chat_template)

    def reply(
        self, turns: list[dict[str, str]], max_tokens: int, show: Callable[[str], None]
    ) -> str:
        """Return the answer to ``turns``, or what continues the last one without a template.

        Raises InputError if the template refuses them, or if they leave no room for an answer.
        """
        inputs = self._prompt(turns)
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        inputs = {name: tensor.to(self._model.device) for name, tensor in inputs.items()}
        length = inputs["input_ids"].shape[1]
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if longest:  # some models have no position after it
            max_tokens = min(max_tokens, longest - length)
        if max_tokens < 1:
            raise InputError(
                f"the chat has {length} tokens, and the model takes {longest}, with its answer",
                where=self._folder,
                hint="begin a new chat",
            )
        streamer = _Shown(self._tokenizer, show)
        with torch.no_grad():
            tokens = self._model.generate(**inputs, max_new_tokens=max_tokens, streamer=streamer)
        said = tokens[0, length:]
        return str(self._tokenizer.decode(said, skip_special_tokens=True)).strip()

    def _prompt(self, turns: list[dict[str, str]]) -> Any:
        if not self.chats:
            return self._tokenizer(turns[-1]["content"], return_tensors="pt")
        try:
            return self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        except Exception as error:  # templates raise any kind
            raise InputError(
                f"the chat template refuses the chat: {first_line(error)}",
                where=self._folder,
                hint="leave out --system if it takes none; or change chat_template.jinja there",
            ) from error
