// JavaScript clients of LLM servers, each reduced to four tasks: chat, stream, tools, structure.
//
//   node js_clients.mjs CLIENT TASK URL MODEL    prints the result as JSON

const [client, task, url, model] = process.argv.slice(2);
const question = "What is the capital of France?";
const sum = "What is 2+2?"; // the answer has an end: to @openai/agents running out of tokens is an error
const limit = 24;

async function schemas() {
  const { z } = await import("zod");
  return z.object({ country: z.string().max(12), city: z.string().max(12) });
}

// The Vercel AI SDK over one of its providers.
async function vercel(make) {
  const { generateText, streamText, generateObject, tool } = await import("ai");
  const asked = { model: await make(), prompt: question, temperature: 0, maxRetries: 0 };
  if (task === "chat") return (await generateText({ ...asked, maxOutputTokens: limit })).text;
  if (task === "stream") {
    const parts = [];
    for await (const part of streamText({ ...asked, maxOutputTokens: limit }).textStream) parts.push(part);
    return parts;
  }
  const schema = await schemas();
  if (task === "tools") {
    const note_capital = tool({ description: "Notes a capital.", inputSchema: schema });
    const { toolCalls } = await generateText({ ...asked, maxOutputTokens: 100, tools: { note_capital }, toolChoice: "required" });
    return [toolCalls[0].toolName, toolCalls[0].input];
  }
  return (await generateObject({ ...asked, maxOutputTokens: 100, schema })).object;
}

async function agents(api) {
  const { Agent, Runner, OpenAIProvider, tool, setTracingDisabled } = await import("@openai/agents");
  setTracingDisabled(true);
  const runner = new Runner({
    modelProvider: new OpenAIProvider({ baseURL: `${url}/v1`, apiKey: "none", useResponses: api === "responses" }),
  });
  const about = (more, settings) =>
    new Agent({ name: "tester", instructions: "Be brief.", model, ...more, modelSettings: { temperature: 0, ...settings } });
  const schema = await schemas();
  if (task === "chat") return (await runner.run(about({}, { maxTokens: 200 }), sum)).finalOutput;
  if (task === "stream") {
    const run = await runner.run(about({}, { maxTokens: 200 }), sum, { stream: true });
    const parts = [];
    for await (const part of run.toTextStream()) parts.push(part);
    await run.completed;
    return parts;
  }
  if (task === "tools") {
    const calls = [];
    const note = tool({
      name: "note_capital", description: "Notes a capital.", parameters: schema,
      execute: async (input) => { calls.push(["note_capital", input]); return "noted"; },
    });
    const agent = about({ tools: [note] }, { maxTokens: 200, toolChoice: "required", parallelToolCalls: false });
    await runner.run(agent, question, { maxTurns: 4 });
    return calls[0];
  }
  return (await runner.run(about({ outputType: schema }, { maxTokens: 100 }), question)).finalOutput;
}

const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const clients = {
  "ai (@ai-sdk/openai, chat)": () => vercel(async () => (await import("@ai-sdk/openai")).createOpenAI(settings).chat(model)),
  "ai (@ai-sdk/openai, responses)": () => vercel(async () => (await import("@ai-sdk/openai")).createOpenAI(settings)(model)),
  "ai (@ai-sdk/openai-compatible)": () =>
    vercel(async () => (await import("@ai-sdk/openai-compatible")).createOpenAICompatible({
      name: "quire", supportsStructuredOutputs: true, ...settings })(model)),
  "ai (@ai-sdk/anthropic)": () => vercel(async () => (await import("@ai-sdk/anthropic")).createAnthropic(settings)(model)),
  "@openai/agents (chat)": () => agents("chat"),
  "@openai/agents (responses)": () => agents("responses"),
};
process.stdout.write(JSON.stringify(await clients[client]()) + "\n");
process.exit(0);
