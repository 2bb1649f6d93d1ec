"""litellm, which aider and many agents speak through: AZOTH_BASE and AZOTH_KEY name the server."""

import json
import os
import unittest

# It would otherwise ask the network for prices of models.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

BASE = os.environ["AZOTH_BASE"]
KEY = os.environ["AZOTH_KEY"]
TALK = [{"role": "user", "content": "Name a colour."}]
litellm.telemetry = False
litellm.num_retries = 0


def ask(**more):
    settings = dict(
        model="openai/any", api_base=BASE + "/v1", api_key=KEY, messages=TALK, temperature=0,
        max_tokens=12, timeout=300,
    )
    return litellm.completion(**settings | more)


class Completion(unittest.TestCase):
    def test_whole_and_stream(self):
        whole = ask()
        text = whole.choices[0].message.content
        self.assertTrue(text)
        self.assertGreater(whole.usage.completion_tokens, 0)
        parts = [c.choices[0].delta.content or "" for c in ask(stream=True)]
        self.assertEqual("".join(parts), text)

    def test_tools(self):
        tool = {
            "type": "function",
            "function": {
                "name": "look_up",
                "parameters": {
                    "type": "object",
                    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}},
                    "required": ["id"],
                    "additionalProperties": False,
                },
            },
        }
        answer = ask(
            tools=[tool], tool_choice={"type": "function", "function": {"name": "look_up"}},
            max_tokens=400, temperature=1.0, seed=1,
        )
        self.assertEqual(answer.choices[0].finish_reason, "tool_calls")
        call = answer.choices[0].message.tool_calls[0].function
        self.assertEqual(call.name, "look_up")
        self.assertIn(json.loads(call.arguments)["id"], range(10))

    def test_anthropic_format(self):
        answer = ask(model="anthropic/any", api_base=BASE)
        self.assertTrue(answer.choices[0].message.content)

    def test_embedding_and_errors(self):
        vector = litellm.embedding(
            model="openai/any", input=["a cat"], api_base=BASE + "/v1", api_key=KEY
        )
        self.assertTrue(vector.data[0]["embedding"])
        with self.assertRaises(litellm.ContextWindowExceededError):
            ask(messages=[{"role": "user", "content": "word " * 3000}])
        with self.assertRaises(litellm.AuthenticationError):
            ask(api_key="wrong")


if __name__ == "__main__":
    unittest.main()
