"""From messages to ids and back, by the tokenizer and the chat template of the model's directory.

The ids of a conversation that goes on are not made again: the template renders all messages, but
only the new text becomes ids. A marker in place of what the model wrote shows where the new text
begins (if the model called a tool, the marker stands in the call's arguments). Example:

    [..., the model "@@", the tool "4"]  ->  ...assistant\\n@@<end>\\n<start>tool\\n4<end>\\n...
    [..., the model "@@"]                ->  ...assistant\\n@@<end>\\n

So `<end>\\n` ends the model's message, and `<start>tool\\n4<end>\\n...` is new. If the engine has
sampled `<end>` itself, only `\\n` is added between the response and what is new.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_r3.data.engines.shape import EngineError
from megatron_r3.record.branches import Message, call_parts, calls_of, text_of
from megatron_r3.replay.words import one_line

_MARK = "R3@@MARK"
# How Hermes, Qwen and the models that follow them write a call: JSON between two tags.
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class ChatTemplate:
    """The tokenizer and chat template of a transformers directory.

    Args:
        directory: the model's. If it has no tokenizer, only requests of token ids can be answered.

    Raises:
        EngineError: transformers is not installed, or cannot load the tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._loaded = directory, None
        self._reads_calls = False  # whether the template is known to write calls that are read
        if not any(directory.glob("tokenizer*")):  # transformers would make an empty tokenizer
            return
        try:
            from transformers import AutoTokenizer

            self._loaded = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # files that are no tokenizer raise errors of any kind
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise EngineError(f"{directory}: its tokenizer cannot be loaded ({reason})") from error

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            raise ValueError(
                f"{self._directory} has no tokenizer: ask /v1/completions with token ids"
            )
        return self._loaded

    def ids_of(self, text: str, special: bool = False) -> list[int]:
        """The ids of a text, with the special tokens of its beginning if `special` is True."""
        return [int(i) for i in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def ids_after(self, last_id: int, text: str) -> list[int]:
        """The ids of a text that goes on after a response, without a second end of the response.

        Example: the response is `yes<end>`, of which the client got `yes`. The client writes the
        template's text itself, and so goes on with `<end>\\n...`: that `<end>` is there already.
        """
        ids = self.ids_of(text)
        is_end = ids[:1] == [last_id] and last_id in self._tokenizer.all_special_ids
        return ids[1:] if is_end else ids

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens; empty if there is no tokenizer."""
        return (
            ""
            if self._loaded is None
            else str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
        )

    def whole(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> list[int]:
        """The ids of a conversation, up to where the model's next message begins.

        Args:
            messages: the whole conversation.
            settings: `tools`, and other arguments of the chat template.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self.ids_of(self._render(messages, settings))

    def new_part(
        self, messages: Sequence[Message], new: int, settings: Mapping[str, Any], last_id: int
    ) -> list[int] | None:
        """The ids to add to a conversation in which the model's message was sampled.

        Args:
            messages: the whole conversation.
            new: how many messages at its end came after the model's message.
            settings: as in `whole`.
            last_id: the last id that was sampled. If it is the id that ends a message, it is not
                added again.

        Returns:
            None if the template writes a message otherwise once others follow it, so that what is
            new cannot be told apart.

        Raises:
            ValueError: the template refuses the messages.
        """
        before, (said, *after) = messages[: -new - 1], messages[-new - 1 :]
        marked = {**said, "content": _MARK}
        if calls := calls_of(said):
            last = {**calls[-1], "function": {"name": "f", "arguments": {"a": _MARK}}}
            marked = {**said, "content": "", "tool_calls": [*calls[:-1], last]}
        text_only = {"role": "assistant", "content": _MARK}
        alone = end = self._after_mark([*before, marked], settings, False)
        joined = self._after_mark([*before, marked, *after], settings, True)
        if marked != text_only:
            end = self._after_mark([*before, text_only], settings, False)
        if alone is None or joined is None or end is None or not joined.startswith(alone):
            return None
        ids = self.ids_of(end + joined[len(alone) :])
        return ids[1:] if ids[:1] == [last_id] else ids

    def message(self, text: str, tools: Any) -> dict[str, Any]:
        """The message of a response: its text, and the calls of tools in the text.

        Args:
            text: what the model wrote.
            tools: the request's tools; without tools nothing is read as a call.
        """
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not tools:
            return message
        try:
            found = [json.loads(call) for call in _CALL.findall(text)]
            calls = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {
                        "name": str(call["name"]),
                        "arguments": json.dumps(call.get("arguments") or {}),
                    },
                }
                for call in found
            ]
        except (ValueError, KeyError):  # a call that is no JSON stays a part of the text
            return message
        if not calls:
            return message
        return {**message, "content": _CALL.sub("", text).strip() or None, "tool_calls": calls}

    def check_tools(self, tools: Any) -> None:
        """Refuse tools where the model writes calls in a form that is not known.

        Raises:
            ValueError: a call that the chat template has written is not read as that call.
        """
        if self._reads_calls:
            return
        function = {"name": "probe", "arguments": {"a": 1}}
        call = {"id": "call00000", "type": "function", "function": function}
        asked = {"role": "user", "content": _MARK}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._after_mark([asked, said], {"tools": tools}, False) or ""
        calls = self.message(text, tools).get("tool_calls", [])
        if [call_parts(found) for found in calls] != [("probe", {"a": 1})]:
            raise ValueError(
                "tools: the chat template of --model does not write calls as JSON between "
                "<tool_call> and </tool_call>, so calls could not be told from text; describe the "
                "tools in a message, and read the calls in the agent"
            )
        self._reads_calls = True

    def _render(
        self, messages: Sequence[Message], settings: Mapping[str, Any], generate: bool = True
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(
                f"{self._directory} has no chat template: ask /v1/completions with ids or text"
            )
        plain = [_for_template(message) for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    plain, tokenize=False, add_generation_prompt=generate, **settings
                )
            )
        except Exception as error:  # a chat template is a program, and may raise anything
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise ValueError(f"the chat template refuses the messages: {reason}") from error

    def _after_mark(
        self, messages: Sequence[Message], settings: Mapping[str, Any], generate: bool
    ) -> str | None:
        """The rendered text after the marker; None if the marker is not there exactly once."""
        parts = self._render(messages, settings, generate).split(_MARK)
        return parts[1] if len(parts) == 2 else None


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: content is a text, arguments of calls are objects."""
    if not isinstance(message.get("role"), str):
        raise ValueError("each message needs a role")
    plain = {**message, "content": text_of(message)}
    if "tool_calls" in message:
        plain["tool_calls"] = [
            {**call, "function": dict(zip(("name", "arguments"), call_parts(call), strict=True))}
            for call in calls_of(message)
        ]
    return plain
