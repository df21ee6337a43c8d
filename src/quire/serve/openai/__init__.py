"""OpenAI's APIs: chat, completions, responses, embeddings, files, batches."""
