"""The Python client: `AsyncClient` and `Client`, with typed events and results.

Calls raise the errors of `stagemesh.common.errors`. docs/errors.md lists every reason that an error can have, its
remedy, and whether a retry helps.
"""

from stagemesh.client.clients import AsyncClient as AsyncClient
from stagemesh.client.clients import AsyncGeneration as AsyncGeneration
from stagemesh.client.clients import Client as Client
from stagemesh.client.clients import Generation as Generation
from stagemesh.client.content import AudioFile as AudioFile
from stagemesh.client.content import AudioSamples as AudioSamples
from stagemesh.client.content import Content as Content
from stagemesh.client.content import Conversation as Conversation
from stagemesh.client.content import ImageFile as ImageFile
from stagemesh.client.content import MediaFile as MediaFile
from stagemesh.client.content import Medium as Medium
from stagemesh.client.content import Message as Message
from stagemesh.client.content import Part as Part
from stagemesh.client.content import Tool as Tool
from stagemesh.client.content import ToolCall as ToolCall
from stagemesh.client.content import VideoFile as VideoFile
from stagemesh.client.content import read_media as read_media
from stagemesh.client.requests import ConverseArguments as ConverseArguments
from stagemesh.client.requests import GenerateArguments as GenerateArguments
from stagemesh.client.requests import OptionValue as OptionValue
from stagemesh.client.requests import StageArguments as StageArguments
from stagemesh.client.requests import TurnDetection as TurnDetection
from stagemesh.client.responses import Admitted as Admitted
from stagemesh.client.responses import Audio as Audio
from stagemesh.client.responses import AudioChunk as AudioChunk
from stagemesh.client.responses import Choice as Choice
from stagemesh.client.responses import EdgeUsage as EdgeUsage
from stagemesh.client.responses import EncodedMedia as EncodedMedia
from stagemesh.client.responses import Event as Event
from stagemesh.client.responses import Finished as Finished
from stagemesh.client.responses import Image as Image
from stagemesh.client.responses import MediaChunk as MediaChunk
from stagemesh.client.responses import OutputFinished as OutputFinished
from stagemesh.client.responses import Progress as Progress
from stagemesh.client.responses import Queued as Queued
from stagemesh.client.responses import Result as Result
from stagemesh.client.responses import StageReport as StageReport
from stagemesh.client.responses import StoredFile as StoredFile
from stagemesh.client.responses import TensorOutput as TensorOutput
from stagemesh.client.responses import Text as Text
from stagemesh.client.responses import Timings as Timings
from stagemesh.client.responses import TokenLogprob as TokenLogprob
from stagemesh.client.responses import TokenLogprobs as TokenLogprobs
from stagemesh.client.responses import Tokens as Tokens
from stagemesh.client.responses import Usage as Usage
from stagemesh.client.retries import RetryPolicy as RetryPolicy
from stagemesh.client.wav import WavWriter as WavWriter
