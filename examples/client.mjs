// A client in JavaScript, without packages: LINNET_URL=http://127.0.0.1:8000 LINNET_KEY=... node examples/client.mjs
const url = process.env.LINNET_URL ?? "http://127.0.0.1:8000";
const headers = { "Content-Type": "application/json", Authorization: `Bearer ${process.env.LINNET_KEY ?? "none"}` };

async function post(path, body) {
  const response = await fetch(url + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response;
}

// Server-sent events end with an empty line. One event may arrive in several chunks, and a chunk may end within a character.
async function* events(response) {
  let rest = "";
  for await (const chunk of response.body.pipeThrough(new TextDecoderStream())) {
    const complete = (rest + chunk).split("\n\n");
    rest = complete.pop();
    for (const event of complete) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

console.log("# A completion (the first model, if none is named)");
const request = { prompt: "The linnet ", max_tokens: 40, seed: 1 };
const answer = await (await post("/v1/completions", request)).json();
console.log(answer.choices[0].text);

console.log("# A chat");
const messages = [{ role: "user", content: "Who sings?" }];
const chat = await (await post("/v1/chat/completions", { messages, max_tokens: 40, seed: 1 })).json();
console.log(chat.choices[0].message.content);

console.log("# The completion again, token by token");
for await (const part of events(await post("/v1/completions", { ...request, stream: true }))) {
  if (part.error) throw new Error(part.error.message);
  process.stdout.write(part.choices[0].text);
}
console.log();

console.log("# A session: the second call sends only what is new");
const session = (await (await post("/v1/sessions", {})).json()).id;
for (const prompt of ["The linnet ", " and then "]) {
  const more = await (await post("/v1/completions", { session, prompt, max_tokens: 20, seed: 1 })).json();
  console.log(prompt + more.choices[0].text);
}
await fetch(`${url}/v1/sessions/${session}`, { method: "DELETE", headers });
