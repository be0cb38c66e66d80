#!/bin/sh
# A client in curl: LINNET_URL=http://127.0.0.1:8000 LINNET_KEY=... sh examples/client.sh
set -eu
url=${LINNET_URL:-http://127.0.0.1:8000}

# ask PATH [JSON]: a GET, or a POST of JSON. -N shows a stream as it arrives.
ask() {
  curl -sSN --fail-with-body "$url$1" -H "Authorization: Bearer ${LINNET_KEY:-none}" \
    ${2:+-H 'Content-Type: application/json' -d "$2"}
  echo
}

echo "# The models"
ask /v1/models

echo "# A completion (the first model, if none is named)"
ask /v1/completions '{"prompt": "The linnet ", "max_tokens": 40, "seed": 1}'

echo "# A chat"
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "Who sings?"}], "max_tokens": 40, "seed": 1}'

echo "# The completion again, token by token"
ask /v1/completions '{"prompt": "The linnet ", "max_tokens": 40, "seed": 1, "stream": true}'

echo "# A session: the second call sends only what is new"
session=$(ask /v1/sessions '{}' | sed 's/.*"id":"\([^"]*\)".*/\1/')
ask /v1/completions "{\"session\": \"$session\", \"prompt\": \"The linnet \", \"max_tokens\": 20, \"seed\": 1}"
ask /v1/completions "{\"session\": \"$session\", \"prompt\": \" and then \", \"max_tokens\": 20, \"seed\": 1}"
curl -sS -o /dev/null -X DELETE "$url/v1/sessions/$session" -H "Authorization: Bearer ${LINNET_KEY:-none}"
