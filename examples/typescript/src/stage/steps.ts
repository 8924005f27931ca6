import { isDeepStrictEqual } from "node:util";
import { type ServerWritableStream, status } from "@grpc/grpc-js";
import { errorToStatus, failure, type StagemeshError, toStagemeshError } from "stagemesh/errors";
import { Connector } from "stagemesh/v1/chunk";
import { EdgeUsage, Finish, FinishReason, Usage } from "stagemesh/v1/request";
import {
  type CancelStepRequest,
  CancelStepResponse,
  type ExecuteStepRequest,
  ExecuteStepResponse,
  type InputBinding,
  type OutputBinding,
  type RebindStepRequest,
  StepFinished,
} from "stagemesh/v1/stage";
import { checkOutput, checkStep, resolveOptions } from "./checks.js";
import { createChunker } from "./chunking.js";
import type { Consumer, Identity } from "./consumer.js";
import { RecentMap, Signal } from "./flows.js";
import type { StageFunction, Task } from "./function.js";
import { IncomingEdge } from "./incoming.js";
import { OutgoingEdge } from "./outgoing.js";
import { OutputStream } from "./outputs.js";
import type { Packet } from "./packets.js";
import type { Producer } from "./producer.js";

const REMEMBERED_REQUESTS = 4096;
const WITHOUT_CALLER_MS = 5000;
const RETAINED_MS = 30_000;

type Event = NonNullable<ExecuteStepResponse["event"]>;
type Call = ServerWritableStream<ExecuteStepRequest, ExecuteStepResponse>;

/** What the steps of a stage have in common. */
export interface StageParts {
  readonly identity: Identity;
  readonly fn: StageFunction;
  readonly consumer: Consumer;
  readonly producer: Producer;
}

/** The steps of this replica: those that run, and those that have ended lately. */
export class Steps {
  isDraining = false;
  readonly #steps = new Map<string, Step>();
  readonly #attempts = new RecentMap<string, number>(REMEMBERED_REQUESTS);

  constructor(readonly parts: StageParts) {}

  /** Serves `ExecuteStep`. */
  execute(call: Call): void {
    try {
      void this.#stepOf(call.request).serve(call);
    } catch (thrown) {
      const error = toStagemeshError(thrown).within({ stage: this.parts.identity.stage });
      call.emit("error", errorToStatus(error));
    }
  }

  /** Serves `RebindStep`. Changes nothing if it throws. */
  rebind(request: RebindStepRequest): void {
    const step = this.#steps.get(request.stepId);
    if (step === undefined) {
      throw failure(status.NOT_FOUND, "UNKNOWN_STEP", `no step ${request.stepId} is known here`);
    }
    step.rebind(request);
  }

  /** Serves `CancelStep`. */
  async cancel({ requestId, attempt, reason }: CancelStepRequest): Promise<CancelStepResponse> {
    const cancelled = [...this.#steps.values()].filter(
      ({ request, isOver }) => request.requestId === requestId && (!attempt || request.attempt <= attempt) && !isOver,
    );
    const error = failure(status.CANCELLED, "CANCELLED", reason || "the request was cancelled");
    await Promise.all(cancelled.map((step) => step.stop(error)));
    const steps = cancelled.reduce((total, step) => total + step.usage.steps, 0n);
    return CancelStepResponse.create({ stopped: cancelled.length, usage: { steps } });
  }

  /** Rejects new steps, and waits until the others have ended. Those that take too long continue elsewhere. */
  async drain(timeoutMs: number): Promise<void> {
    this.isDraining = true;
    const running = [...this.#steps.values()].filter(({ isOver }) => !isOver);
    const drained = failure(status.UNAVAILABLE, "DRAINED", `replica ${this.parts.identity.replica} was stopped`);
    const timer = setTimeout(() => running.map((step) => step.stop(drained)), timeoutMs);
    await Promise.all(running.map((step) => step.ended()));
    clearTimeout(timer);
  }

  /** Returns the step of a request, which is started unless it is known. */
  #stepOf(request: ExecuteStepRequest): Step {
    const { requestId, stepId, attempt } = request;
    const highest = this.#attempts.get(requestId) ?? 0;
    const metadata = { attempt: String(highest) };
    if (attempt < highest) {
      const message = `attempt ${attempt} of ${requestId} was replaced by attempt ${highest}`;
      throw failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, metadata);
    }
    const known = this.#steps.get(stepId);
    if (known !== undefined) {
      // Maps have no order, so the decoded messages are compared, not their bytes.
      if (isDeepStrictEqual(contentOf(known.request), contentOf(request))) return known;
      throw failure(status.ALREADY_EXISTS, "STEP_EXISTS", `step ${stepId} exists with other content`, metadata);
    }
    if (request.attachOnly) {
      throw failure(status.NOT_FOUND, "UNKNOWN_STEP", `step ${stepId} was not started here, or has ended long ago`);
    }
    if (this.isDraining) {
      const message = `replica ${this.parts.identity.replica} stops and accepts no steps`;
      throw failure(status.FAILED_PRECONDITION, "NOT_READY", message);
    }
    const step = new Step(request, this.parts, () => this.#steps.delete(stepId));
    this.#attempts.set(requestId, attempt);
    for (const { request: other, stop } of this.#steps.values()) {
      if (other.requestId !== requestId || other.attempt >= attempt) continue;
      void stop(failure(status.CANCELLED, "CANCELLED", `attempt ${attempt} replaces attempt ${other.attempt}`));
    }
    this.#steps.set(stepId, step);
    step.start();
    return step;
  }
}

/** Returns a request without what repeated calls of its step need not share. */
function contentOf(request: ExecuteStepRequest): ExecuteStepRequest {
  return { ...request, traceparent: "", attachOnly: false };
}

/** One step: a stage's part of a request. */
class Step {
  readonly usage = Usage.create();
  readonly #incoming = new Map<string, IncomingEdge>();
  readonly #outgoing = new Map<string, OutgoingEdge>();
  readonly #outputs: ReadonlyMap<string, OutputStream>;
  readonly #options: Task["options"];
  readonly #events: Event[] = [];
  readonly #changed = new Signal();
  readonly #stopping = new AbortController();
  readonly #beganAt = performance.now();
  #end: "succeeded" | StagemeshError | undefined;
  #stopped: StagemeshError | undefined;
  #firstOutputS: number | undefined;
  #callers = 0;
  #callerTimer: NodeJS.Timeout | undefined;

  /** Throws StagemeshError if the step cannot run here. */
  constructor(
    readonly request: ExecuteStepRequest,
    readonly parts: StageParts,
    /** Called when nothing needs the step any more. */
    readonly onForgotten: () => void,
  ) {
    const { signature } = parts.fn;
    checkStep(request, signature);
    this.#options = resolveOptions(request.parameters?.options ?? {}, signature);
    const streamed = signature.emits.filter(({ spec }) => request.streamed.some(({ tensor }) => tensor === spec?.name));
    this.#outputs = new Map(streamed.map((emitted) => [emitted.spec?.name ?? "", new OutputStream(emitted)]));
    for (const { edge } of request.inputs) this.#incoming.set(edge, new IncomingEdge(edge));
    for (const { edge, policy, tensors } of request.outputs) {
      this.#outgoing.set(edge, new OutgoingEdge(edge, createChunker(policy), tensors));
    }
  }

  get isOver(): boolean {
    return this.#end !== undefined;
  }

  /** Registers the incoming flows, and runs the function. */
  start(): void {
    for (const binding of this.request.inputs) {
      const edge = this.#incoming.get(binding.edge);
      if (edge) edge.flow = this.parts.consumer.expect(this.#keyOf(binding), binding.producer, edge);
    }
    this.#emit({ $case: "accepted", value: { queuePosition: 0 } });
    for (const binding of this.request.outputs) this.#bind(binding);
    void this.#run();
  }

  /** Sends a caller all events of the step from the first one on, and then the end of the step. */
  async serve(call: Call): Promise<void> {
    call.on("cancelled", () => this.#changed.fire());
    this.#callers += 1;
    clearTimeout(this.#callerTimer);
    for (let sent = 0; !call.cancelled; await this.#changed.next()) {
      for (; sent < this.#events.length; sent++) call.write(ExecuteStepResponse.create({ event: this.#events[sent] }));
      if (this.#end === "succeeded") call.end();
      else if (this.#end !== undefined) call.emit("error", errorToStatus(this.#end));
      if (this.isOver) break;
    }
    this.#callers -= 1;
    if (this.#callers > 0 || this.isOver) return;
    const error = failure(status.CANCELLED, "CANCELLED", "the step has no caller");
    this.#callerTimer = setTimeout(() => this.stop(error), WITHOUT_CALLER_MS);
  }

  /** Stops the step. Resolves when it has ended. */
  readonly stop = (error: StagemeshError): Promise<void> => {
    this.#stopped ??= error;
    this.#stopping.abort(error);
    this.#closeEdges(error);
    return this.ended();
  };

  async ended(): Promise<void> {
    while (!this.isOver) await this.#changed.next();
  }

  rebind({ inputs, outputs }: RebindStepRequest): void {
    const changes: (() => void)[] = [];
    for (const { binding, firstRows } of inputs) {
      const edge = binding && this.#incoming.get(binding.edge);
      if (!edge) throw this.#unknownEdge(binding?.edge);
      const key = this.#keyOf(binding);
      if (isInForce(key.attempt, edge.flow?.key.attempt, binding.edge)) continue;
      edge.checkRows(firstRows);
      changes.push(() => edge.rebind(this.parts.consumer.expect(key, binding.producer, edge), firstRows));
    }
    for (const binding of outputs) {
      const edge = this.#outgoing.get(binding.edge);
      if (!edge) throw this.#unknownEdge(binding.edge);
      checkOutput(binding);
      if (isInForce(this.#keyOf(binding).attempt, edge.flow?.key.attempt, binding.edge)) continue;
      edge.checkRetained();
      changes.push(() => this.#bind(binding));
    }
    for (const change of changes) change();
  }

  async #run(): Promise<void> {
    const { requestId, seed, input } = this.request;
    const task = { requestId, seed, input, options: this.#options, signal: this.#stopping.signal };
    try {
      const [packets = noPackets()] = this.#incoming.values();
      for await (const packet of this.parts.fn.run(packets, task)) await this.#send(packet);
      if (this.#stopped !== undefined) throw this.#stopped;
      for (const output of this.#outputs.values()) this.#emit({ $case: "output", value: output.finish() });
      await Promise.all([...this.#outgoing.values()].map((edge) => edge.finish()));
      // If the function ended before its input, a rejection of the rest would fail the producer and the request.
      for await (const unread of packets) void unread;
      this.#emitFinished();
      this.#end = "succeeded";
    } catch (thrown) {
      this.#end = (this.#stopped ?? toStagemeshError(thrown)).within({ stage: this.parts.identity.stage });
      this.#emit({ $case: "usage", value: this.usage });
      this.#closeEdges(this.#end);
    }
    clearTimeout(this.#callerTimer);
    this.#changed.fire();
    this.#forgetLater();
  }

  async #send(packet: Packet): Promise<void> {
    this.#firstOutputS ??= this.#elapsedS();
    for (const tensor of packet.tensors) {
      const part = this.#outputs.get(tensor.name)?.add(tensor);
      if (part) this.#emit({ $case: "output", value: part });
    }
    this.usage.steps += 1n;
    this.#emit({ $case: "progress", value: { steps: this.usage.steps } });
    await Promise.all([...this.#outgoing.values()].map((edge) => edge.send(packet)));
  }

  #emitFinished(): void {
    const timings = { startedS: 0, firstOutputS: this.#firstOutputS, finishedS: this.#elapsedS() };
    const edges = [...this.#outgoing.values()].map(({ name, usage }) =>
      EdgeUsage.create({ edge: name, connector: Connector.GRPC, ...usage }),
    );
    const finish = Finish.create({ reason: FinishReason.END });
    this.#emit({ $case: "finished", value: StepFinished.create({ usage: this.usage, timings, edges, finish }) });
  }

  #closeEdges(error: StagemeshError): void {
    for (const edge of this.#incoming.values()) edge.close(error);
    for (const edge of this.#outgoing.values()) edge.abort(error);
  }

  /** Retains the events for another call, and the chunks of outgoing edges until their consumers have committed them. */
  #forgetLater(): void {
    setTimeout(() => {
      const isNeeded = [...this.#outgoing.values()].some(({ isCommitted, flow }) => !isCommitted && !flow?.error);
      if (isNeeded && this.#end === "succeeded") this.#forgetLater();
      else this.onForgotten();
    }, RETAINED_MS).unref();
  }

  #bind(binding: OutputBinding): void {
    const edge = this.#outgoing.get(binding.edge);
    if (edge) this.parts.producer.bind(edge, this.#keyOf(binding), binding.consumer, binding.endpoint);
  }

  #keyOf({ edge, attempt }: InputBinding | OutputBinding) {
    return { requestId: this.request.requestId, edge, attempt: attempt || this.request.attempt };
  }

  #unknownEdge(edge = ""): StagemeshError {
    return failure(status.NOT_FOUND, "UNKNOWN_EDGE", `step ${this.request.stepId} has no edge ${edge}`, { edge });
  }

  #elapsedS(): number {
    return (performance.now() - this.#beganAt) / 1000;
  }

  #emit(event: Event): void {
    this.#events.push(event);
    this.#changed.fire();
  }
}

/** Returns whether an attempt of an edge is the present one. Throws STALE_ATTEMPT if it is lower. */
function isInForce(attempt: number, present: number | undefined, edge: string): boolean {
  if (present === undefined || attempt > present) return false;
  if (attempt === present) return true;
  const message = `edge ${edge} is in attempt ${present}, not ${attempt}`;
  throw failure(status.FAILED_PRECONDITION, "STALE_ATTEMPT", message, { attempt: String(present), edge });
}

async function* noPackets(): AsyncGenerator<Packet, void, void> {}
