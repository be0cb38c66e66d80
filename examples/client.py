"""A client in Python: OpenAI's own package, unchanged. `LINNET_URL=http://127.0.0.1:8000 LINNET_KEY=... python examples/client.py`"""

from __future__ import annotations

import os

from openai import OpenAI

url = os.environ.get("LINNET_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("LINNET_KEY", "none"))
model = client.models.list().data[0].id

print("# A completion")
answer = client.completions.create(model=model, prompt="The linnet ", max_tokens=40, seed=1)
print(answer.choices[0].text)

print("# A chat")
chat = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Who sings?"}], max_tokens=40, seed=1
)
print(chat.choices[0].message.content)

print("# The completion again, token by token")
for part in client.completions.create(model=model, prompt="The linnet ", max_tokens=40, seed=1, stream=True):
    print(part.choices[0].text, end="", flush=True)
print()

print("# A session: the second call sends only what is new")
session = client.post("/sessions", body={}, cast_to=dict[str, object])
for prompt in ("The linnet ", " and then "):
    answer = client.completions.create(
        model=model, prompt=prompt, max_tokens=20, seed=1, extra_body={"session": session["id"]}
    )
    print(prompt + answer.choices[0].text)
client.delete(f"/sessions/{session['id']}", cast_to=dict[str, object])
client.close()
