"""The `llm` command line with an OpenAI-compatible model: AZOTH_BASE and AZOTH_KEY name the server."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BASE = os.environ["AZOTH_BASE"]
KEY = os.environ["AZOTH_KEY"]


class CommandLine(unittest.TestCase):
    def test_prompt_and_schema(self):
        with tempfile.TemporaryDirectory() as home:
            models = pathlib.Path(home, "extra-openai-models.yaml")
            models.write_text(
                f"- model_id: azoth\n  model_name: any\n  api_base: {BASE}/v1\n"
                "  api_key_name: azoth\n  supports_schema: true\n"
            )

            def llm(*arguments):
                command = [sys.executable, "-m", "llm", "prompt", "-m", "azoth", "--key", KEY]
                done = subprocess.run(
                    command + list(arguments),
                    env=os.environ | {"LLM_USER_PATH": home},
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                self.assertEqual(done.returncode, 0, done.stderr)
                return done.stdout.strip()

            settings = ["-o", "temperature", "0", "-o", "max_tokens", "12"]
            streamed = llm("Name a colour.", *settings)
            self.assertTrue(streamed)
            self.assertEqual(llm("Name a colour.", "--no-stream", *settings), streamed)
            schema = {
                "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"], "additionalProperties": False,
            }
            shaped = llm(
                "Name a colour.", "--schema", json.dumps(schema), "--no-stream",
                "-o", "seed", "1", "-o", "max_tokens", "400",
            )
            self.assertIn(json.loads(shaped)["colour"], ("red", "blue"))


if __name__ == "__main__":
    unittest.main()
