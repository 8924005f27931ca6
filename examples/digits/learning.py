"""The training of the autoencoder on images, and then of the transformer on the autoencoder's latents."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from examples.digits.blank import Autoencoder, Pipeline
from examples.digits.prompts import NO_PROMPTS, WORDINGS, all_prompts
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

_PEAK_RATE = 4e-3
_KL_WEIGHT = 1e-4
_UNPROMPTED = 0.1
"""The fraction of training examples with an empty prompt, which guidance requires."""
_SAID_EVERY = 50


def learn_pictures(vae: Autoencoder, images: Tensor, *, steps: int) -> None:
    """Trains the autoencoder on images, [n, 3, 1, height, width] in [-1, 1], and stores the scale of its latents."""

    def loss() -> Tensor:
        batch = images[torch.randint(len(images), (32,))]
        latents = vae.encode(batch).latent_dist
        reconstruction: Tensor = vae.decode(latents.sample()).sample
        spread: Tensor = latents.kl().mean()
        return mse_loss(reconstruction, batch) + _KL_WEIGHT * spread

    _descend(vae.parameters(), loss, what="autoencoder", steps=steps)
    latents = _encoded(vae, images)
    over = (0, 2, 3, 4)
    vae.register_to_config(latents_mean=latents.mean(over).tolist(), latents_std=latents.std(over).tolist())


def learn_prompts(pipeline: Pipeline, images: Tensor, digits: Tensor, *, steps: int) -> None:
    """Trains the transformer to denoise images, [n, 3, 1, height, width], of the digits, [n]."""
    embeds, mask = _prompt_embeds(pipeline)
    latents = _patches(_normalised(pipeline.vae, images))
    count, height, width, channels = latents.shape
    latents = latents.view(count, height * width, channels)
    size = 128

    def loss() -> Tensor:
        chosen = torch.randint(count, (size,))
        texts = _drawn_prompts(digits[chosen])
        clean, noise, sigma = latents[chosen], torch.randn(size, height * width, channels), torch.rand(size)
        velocity: Tensor = pipeline.transformer(
            hidden_states=torch.lerp(clean, noise, sigma[:, None, None]),
            timestep=sigma,
            encoder_hidden_states=embeds[texts],
            encoder_hidden_states_mask=mask[texts],
            img_shapes=[[(1, height, width)]] * size,
        ).sample
        return mse_loss(velocity, noise - clean)

    _descend(pipeline.transformer.parameters(), loss, what="transformer", steps=steps)


def _descend(parameters: Iterable[Parameter], loss: Callable[[], Tensor], *, what: str, steps: int) -> None:
    parameters = list(parameters)
    optimizer = AdamW(parameters, lr=_PEAK_RATE)
    schedule = OneCycleLR(optimizer, max_lr=_PEAK_RATE, total_steps=steps)
    total = 0.0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        value: Any = loss()
        value.backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        total += value.item()
        if step % _SAID_EVERY == 0:
            print(f"{what}: step {step} of {steps}, loss {total / _SAID_EVERY:.4f}", flush=True)
            total = 0.0


def _drawn_prompts(digits: Tensor) -> Tensor:
    """Returns a random prompt for each digit, [n], as its index in all_prompts."""
    texts = digits * len(WORDINGS) + torch.randint(len(WORDINGS), digits.shape)
    nothing = len(all_prompts()) - 1 - torch.randint(len(NO_PROMPTS), digits.shape)
    return torch.where(torch.rand(digits.shape) < _UNPROMPTED, nothing, texts)


@torch.no_grad()
def _prompt_embeds(pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """Returns the embeddings of all_prompts, [n, longest, width], and a mask without padding rows, [n, longest]."""
    embeds, mask = pipeline.encode_prompt(all_prompts())
    return embeds, mask


def _normalised(vae: Autoencoder, images: Tensor) -> Tensor:
    mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    return (_encoded(vae, images) - mean) / std


@torch.no_grad()
def _encoded(vae: Autoencoder, images: Tensor) -> Tensor:
    batches = (images[start : start + 64] for start in range(0, len(images), 64))
    return torch.cat([vae.encode(batch).latent_dist.mean for batch in batches])


def _patches(latents: Tensor) -> Tensor:
    """Converts latents, [n, channels, 1, 2 h, 2 w], to the transformer's layout, [n, h, w, channels * 4]."""
    return latents.squeeze(2).unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
