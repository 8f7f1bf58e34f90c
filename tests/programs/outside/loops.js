// A loop in each thread: the main one asks by HTTP/2 and by plain connections what two workers serve.
'use strict';
const {Worker, isMainThread, parentPort} = require('worker_threads');
const crypto = require('crypto');
const http2 = require('http2');
const net = require('net');

const digest = (bytes) => crypto.createHash('md5').update(bytes).digest('hex');
const CONNECTIONS = 8;

// Of what begins with its length.
function serve(socket) {
    let parts = [], length = 0;
    socket.on('data', (part) => {
        parts.push(part);
        length += part.length;
        for (;;) {
            if (length < 4) return;
            const all = Buffer.concat(parts), end = 4 + all.readUInt32BE(0);
            parts = [all];
            if (length < end) return;
            socket.write(digest(all.subarray(4, end)));
            parts = [all.subarray(end)];
            length -= end;
        }
    });
    socket.on('error', (error) => { throw error; });
}

function ask(socket, body) {
    const head = Buffer.alloc(4);
    head.writeUInt32BE(body.length);
    return new Promise((resolve) => {
        let answer = '';
        const hear = (part) => {
            answer += part;
            if (answer.length < 32) return;
            socket.removeListener('data', hear);
            if (answer !== digest(body)) throw new Error(`${body.length} bytes arrived changed`);
            resolve();
        };
        socket.on('data', hear);
        socket.write(head);
        socket.write(body);
    });
}

function ask2(session, body) {
    return new Promise((resolve, reject) => {
        const stream = session.request({':method': 'POST', ':path': '/'});
        const parts = [];
        stream.on('data', (part) => parts.push(part));
        stream.on('end', () => {
            if (Buffer.concat(parts).toString() !== digest(body)) reject(new Error('a body arrived changed'));
            resolve();
        });
        stream.on('error', reject);
        stream.end(body);
    });
}

async function main() {
    const ports = [];
    const workers = [];
    for (const kind of ['net', 'http2']) {
        const worker = new Worker(__filename);
        workers.push(worker);
        worker.postMessage(kind);
        ports.push(await new Promise((resolve) => worker.once('message', resolve)));
    }
    const sockets = await Promise.all([...Array(CONNECTIONS)].map(() => new Promise((resolve) => {
        const socket = net.connect(ports[0], '127.0.0.1', () => resolve(socket));
    })));
    const sessions = [...Array(CONNECTIONS)].map(() => http2.connect(`http://127.0.0.1:${ports[1]}`));
    const rounds = async (first, last) => {
        for (let round = first; round < last; round++) {
            const body = crypto.randomBytes(1 + (round * 7919) % 150000);
            const streams = sessions.flatMap((session) => [ask2(session, body), ask2(session, body)]);
            await Promise.all([...sockets.map((socket) => ask(socket, body)), ...streams]);
        }
    };
    await rounds(0, 10);
    console.log(`port ${ports[0]}`);
    console.log(`port ${ports[1]}`);
    process.stdin.once('data', async () => {
        await rounds(10, 40);
        sockets.forEach((socket) => socket.end());
        sessions.forEach((session) => session.close());
        await Promise.all(workers.map((worker) => worker.terminate()));
        console.log('all well');
        process.exit(0);
    });
}

function work(kind) {
    const server = kind === 'net' ? net.createServer(serve) : http2.createServer();
    server.on('stream', (stream) => {
        const parts = [];
        stream.on('data', (part) => parts.push(part));
        stream.on('end', () => {
            stream.respond({':status': 200});
            stream.end(digest(Buffer.concat(parts)));
        });
    });
    server.listen(0, '127.0.0.1', () => parentPort.postMessage(server.address().port));
}

if (isMainThread) main();
else parentPort.once('message', work);
