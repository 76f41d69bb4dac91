"""Output capture of transformers: hidden states and attentions of any model, asked for by flags."""
