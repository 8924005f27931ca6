export { type GenerateInput, type GenerateOptions, StagemeshClient } from "./client.js";
export type { Identity } from "./credentials.js";
export { type Reason, StagemeshError } from "./errors.js";
export { InputMode } from "./gen/stagemesh/v1/orchestrator.js";
export { FinishReason, Role } from "./gen/stagemesh/v1/request.js";
export type { GenerateEvent } from "./received.js";
export { audioPart, type Content } from "./session/pieces.js";
export { type Heard, type Session, type SessionInput } from "./session/session.js";
export type { SessionEvent } from "./session/state.js";
