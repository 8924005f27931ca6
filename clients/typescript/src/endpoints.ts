import { Metadata, type ServiceError, status } from "@grpc/grpc-js";
import { channelCredentials, type Identity } from "./credentials.js";
import { errorFromStatus, StagemeshError } from "./errors.js";
import {
  DescribePipelineRequest,
  type DescribePipelineResponse,
  OrchestratorServiceClient,
} from "./gen/stagemesh/v1/orchestrator.js";
import { CHANNEL_OPTIONS, checkProtocol, PROTOCOL } from "./protocol.js";

const DESCRIBE_TIMEOUT_MS = 5000;

/** The orchestrators of a pipeline. One of them is in use until it fails. */
export class Endpoints {
  readonly stubs: readonly OrchestratorServiceClient[];
  readonly #checked = new Set<OrchestratorServiceClient>();
  #current = 0;

  constructor(endpoints: readonly string[], identity: Identity) {
    if (endpoints.length === 0) throw new RangeError("a client needs the address of an orchestrator");
    const credentials = channelCredentials(identity);
    this.stubs = endpoints.map((endpoint) => new OrchestratorServiceClient(endpoint, credentials, CHANNEL_OPTIONS));
  }

  /** The orchestrator that is in use. */
  get current(): OrchestratorServiceClient {
    return this.stubs[this.#current]!;
  }

  /** Returns the orchestrator that is in use, if it has a version in common with this client. Throws StagemeshError. */
  async checked(): Promise<OrchestratorServiceClient> {
    const stub = this.current;
    if (this.#checked.has(stub)) return stub;
    try {
      checkProtocol("the orchestrator", (await describe(stub)).protocol);
    } catch (thrown) {
      const isSilent = thrown instanceof StagemeshError && thrown.code === status.DEADLINE_EXCEEDED;
      throw isSilent ? new StagemeshError(status.UNAVAILABLE, "", "the orchestrator does not answer") : thrown;
    }
    this.#checked.add(stub);
    return stub;
  }

  /** Uses the next orchestrator from now on if this error says that the current one is unavailable. */
  leave({ code }: StagemeshError): void {
    if (code === status.UNAVAILABLE) this.next();
  }

  /** Uses the next orchestrator from now on. */
  next(): void {
    this.#current = (this.#current + 1) % this.stubs.length;
  }

  close(): void {
    for (const stub of this.stubs) stub.close();
  }
}

/** Returns the current state of an orchestrator's pipeline. Throws StagemeshError. */
export function describe(stub: OrchestratorServiceClient): Promise<DescribePipelineResponse> {
  const request = DescribePipelineRequest.create({ protocol: PROTOCOL });
  const deadline = Date.now() + DESCRIBE_TIMEOUT_MS;
  return unary((done) => stub.describePipeline(request, new Metadata(), { deadline }, done));
}

/** Makes a call with one response. Throws StagemeshError. */
export function unary<T>(call: (done: (error: ServiceError | null, response: T) => void) => unknown): Promise<T> {
  return new Promise((resolve, reject) => {
    call((error, response) => (error ? reject(errorFromStatus(error)) : resolve(response)));
  });
}
