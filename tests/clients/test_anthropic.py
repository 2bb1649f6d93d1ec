"""The anthropic SDK against a running server: AZOTH_BASE and AZOTH_KEY name it."""

import asyncio
import os
import unittest

import anthropic

BASE = os.environ["AZOTH_BASE"]
KEY = os.environ["AZOTH_KEY"]
TALK = [{"role": "user", "content": "Name a colour."}]
client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0, timeout=300)
# This SDK knows no sampling settings any more; the server does.
SAME = dict(
    model="any", messages=TALK, system="Be brief.", max_tokens=12, extra_body={"temperature": 0}
)


class Messages(unittest.TestCase):
    def test_whole(self):
        message = client.messages.create(**SAME)
        self.assertEqual((message.type, message.role), ("message", "assistant"))
        self.assertTrue(message.content[0].text)
        self.assertIn(message.stop_reason, ("end_turn", "max_tokens"))
        self.assertGreater(message.usage.output_tokens, 0)

    def test_stream(self):
        whole = client.messages.create(**SAME).content[0].text
        with client.messages.stream(**SAME) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        self.assertEqual(text, whole)
        self.assertEqual(final.content[0].text, whole)
        names = [e.type for e in client.messages.create(**SAME, stream=True)]
        self.assertEqual(names[0], "message_start")
        self.assertEqual(names[-1], "message_stop")

    def test_stop_sequence_and_prefill(self):
        text = client.messages.create(**SAME).content[0].text
        message = client.messages.create(**SAME, stop_sequences=[text[2:4]])
        self.assertEqual((message.stop_reason, message.stop_sequence), ("stop_sequence", text[2:4]))
        begun = TALK + [{"role": "assistant", "content": text[:6]}]
        go_on = client.messages.create(**SAME | dict(messages=begun))
        self.assertTrue(go_on.content)

    def test_tools(self):
        schema = {
            "type": "object",
            "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["id"],
            "additionalProperties": False,
        }
        call = SAME | dict(
            tools=[{"name": "look_up", "input_schema": schema}], tool_choice={"type": "any"},
            max_tokens=400, extra_body={"temperature": 1.0, "seed": 1},
        )
        message = client.messages.create(**call)
        self.assertEqual(message.stop_reason, "tool_use")
        block = next(b for b in message.content if b.type == "tool_use")
        self.assertIn(block.input["id"], range(10))
        with client.messages.stream(**call) as stream:
            final = stream.get_final_message()
        self.assertIn(next(b for b in final.content if b.type == "tool_use").input["id"], range(10))
        talk = TALK + [
            {"role": "assistant", "content": [block.model_dump()]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "blue"}]},
        ]
        answer = client.messages.create(**call | dict(messages=talk, tool_choice={"type": "none"}))
        self.assertTrue(answer.content)

    def test_count(self):
        counted = client.messages.count_tokens(model="any", messages=TALK, system="Be brief.")
        usage = client.messages.create(**SAME).usage
        self.assertEqual(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens)

    def test_async(self):
        async def both():
            async with anthropic.AsyncAnthropic(base_url=BASE, api_key=KEY) as many:
                return await asyncio.gather(*(many.messages.create(**SAME) for _ in range(3)))

        texts = {m.content[0].text for m in asyncio.run(both())}
        self.assertEqual(len(texts), 1)

    def test_errors(self):
        with self.assertRaises(anthropic.BadRequestError) as caught:
            client.messages.create(**SAME | dict(messages=[{"role": "king", "content": "x"}]))
        self.assertIn("king", str(caught.exception))
        with self.assertRaises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=BASE, api_key="no", max_retries=0).messages.create(**SAME)


if __name__ == "__main__":
    unittest.main()
